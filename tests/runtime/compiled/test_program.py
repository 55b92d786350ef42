"""What a compiled forward leaves for its backward outside of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raypipe.errors import RunError
from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled.program import ProgramRun
from tests.runtime.compiled.pieces import compiled_device
from tests.runtime.runs.one_device import OneDevice, even_cut

SPEC = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=256, dropout=0.0)


def forward() -> tuple[OneDevice, Tensor, ProgramRun]:
    """A compiled device, the activation that its second stage got, and what the forward of that stage has left."""
    model = GptLayers(SPEC, torch.float64)
    ids = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    made, _, _ = compiled_device(model, even_cut(model, 2), rows, torch.float64, 2)
    executor = made.executor
    executor.split, executor.step, executor.base = "train", 0, 0
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    outputs, graph = executor.computation.run((1, 0), executor._microbatches((1, 0), (0,)), (x,), None)
    assert isinstance(graph, ProgramRun)
    assert not outputs[0].requires_grad
    return made, x, graph


def test_weights_overwritten_before_the_backward_are_noticed() -> None:
    made, x, graph = forward()
    with torch.no_grad():
        for parameter in made.stages[1].parameters():
            parameter.mul_(2.0)
    with pytest.raises(RunError, match="overwritten between forward and backward"):
        graph.backward(made.stages[1], (x,), (torch.ones((), dtype=torch.float64),), None)


def test_an_output_that_gets_no_gradient_counts_as_zero() -> None:
    made, x, graph = forward()
    graph._program.tangents = ((0, None),)
    graph._unfed = {0: torch.zeros((), dtype=torch.float64)}
    (back,) = graph.backward(made.stages[1], (x,), (), None)
    assert back.shape == x.shape
    assert not back.any()
