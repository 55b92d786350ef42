"""What a compiled forward leaves for its backward, and gradients of pieces added to those that are there, in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raypipe.errors import RunError
from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.compiled.layout import Gradient
from raypipe.runtime.compiled.program import Accumulation, ProgramRun
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


GRADIENTS = (Gradient(0, 0, 1), Gradient(1, 2), Gradient(2, 2, shared=True), Gradient(3, 3))
"""A product, one gradient that two vectors share, and another vector."""


@pytest.mark.parametrize("held", [torch.float64, torch.float32], ids=["the pieces' dtype", "another dtype"])
@pytest.mark.parametrize("later", [False, True], ids=["B", "W"])
def test_micro_batches_add_up_in_place(held: torch.dtype, later: bool) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=held)) for shape in ((4, 3), (5,), (5,), (2,))]
    accumulation = Accumulation(GRADIENTS)
    wanted = [torch.zeros_like(p) for p in parameters]
    totals = []
    for _ in range(3):
        values = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 7), (7, 3), (5,), (2,))]
        calls: list[int] = []

        def compute(values: list[Tensor] = values, calls: list[int] = calls) -> list[Tensor]:
            calls.append(1)
            return values

        closures = accumulation.later(compute, parameters) if later else accumulation.ready(values, parameters)
        assert calls == []
        for closure in closures:
            closure.compute()
        assert calls == [1] * later
        for total, one in zip(wanted, (values[0] @ values[1], values[2], values[2], values[3]), strict=True):
            total += one
        totals.append([p.grad for p in parameters])
    for p, total in zip(parameters, wanted, strict=True):
        assert p.grad is not None
        assert (p.grad - total).abs().max() <= (1e-14 if held == torch.float64 else 1e-6)
    assert all(a is b for a, b in zip(totals[0], totals[2], strict=True)), "no other tensor takes their place"


def test_nothing_to_add_runs_nothing() -> None:
    def compute() -> list[Tensor]:
        raise AssertionError("nobody needs it")

    assert Accumulation(()).later(compute, []) == []
