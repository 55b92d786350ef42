"""What a backward holds layer by layer tells how much it would hold with weight gradients postponed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from raypipe.runtime.backward.deferred import Closure, WeightQueue, deferred_linear
from raypipe.runtime.backward.waiting import LayerPeaks, WaitingOperands
from raypipe.runtime.process.memory import PeakMeter, heap_bytes
from raypipe.schedule.families.out_of_order import postponed_peaks

LAYERS, WIDTH, ROWS = 4, 64, 16384
UNIT = ROWS * WIDTH * 4
"""Bytes of a layer's input or output."""
Weights = Sequence[Sequence[nn.Parameter]]
Model = Callable[[Tensor, Weights, WeightQueue], Tensor]


def plain(x: Tensor, weights: Weights, queue: WeightQueue) -> Tensor:
    for weight, _ in weights:
        x = torch.relu(deferred_linear(x, weight, None, queue))
    return x.sum()


def residual(x: Tensor, weights: Weights, queue: WeightQueue) -> Tensor:
    for weight, _ in weights:
        x = x + torch.tanh(deferred_linear(x, weight, None, queue))
    return x.sum()


def gated(x: Tensor, weights: Weights, queue: WeightQueue) -> Tensor:
    for one, other in weights:
        x = x + torch.tanh(deferred_linear(x, one, None, queue)) * deferred_linear(x, other, None, queue)
    return x.sum()


def weights_of() -> list[list[nn.Parameter]]:
    result = [[nn.Parameter(torch.full((WIDTH, WIDTH), 0.01)) for _ in range(2)] for _ in range(LAYERS)]
    for weight in chain(*result):
        weight.grad = torch.zeros_like(weight)
    return result


@pytest.fixture(autouse=True)
def no_other_garbage() -> Iterator[None]:
    """Leave what the session holds out of the collections of a test, which then take no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def heap_without_garbage() -> int:
    gc.collect()
    return heap_bytes()


def measured(model: Model, k: int) -> float:
    """The peak of a backward with ``k`` layers postponed, above what there is without the model."""
    queue, x, weights = WeightQueue(), torch.ones(ROWS, WIDTH), weights_of()
    queue.only = frozenset(chain(*weights[:k]))
    before = heap_without_garbage()
    closures: list[Closure] = []
    loss = model(x, weights, queue)
    with PeakMeter(torch.device("cpu")) as meter, queue.collect(closures):
        loss.backward()
    assert len(closures) == k * (2 if model is gated else 1)
    return meter.peak - before


@pytest.mark.parametrize(("model", "waits"), [(plain, 2), (residual, 2), (gated, 3)])
def test_predicted_peaks_are_measured(model: Model, waits: int) -> None:
    """By a backward that postpones nothing; ``waits`` counts what a layer's weight gradients wait for."""
    measured(model, LAYERS)  # the first backward loads code
    queue, x, weights = WeightQueue(), torch.ones(ROWS, WIDTH), weights_of()
    queue.only, queue.waiting = frozenset(), WaitingOperands(watched=True)
    before = heap_without_garbage()
    loss = model(x, weights, queue)
    with LayerPeaks(torch.device("cpu"), queue.waiting, weights) as meter:
        loss.backward()
    result = meter.found()
    assert result.waiting == [waits * UNIT] * LAYERS
    for k, peak in enumerate(postponed_peaks(result)):
        assert peak - before == pytest.approx(measured(model, k), rel=0.02), f"k = {k}"
