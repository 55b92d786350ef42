"""Gradients of compiled pieces are added to those that are there, in place, in whatever dtype these have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypipe.runtime.compiled.accumulate import Accumulation
from raypipe.runtime.compiled.layout import Gradient

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

        def compute(values: list[torch.Tensor] = values, calls: list[int] = calls) -> list[torch.Tensor]:
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
    def compute() -> list[torch.Tensor]:
        raise AssertionError("nobody needs it")

    assert Accumulation(()).later(compute, []) == []
