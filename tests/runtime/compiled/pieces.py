"""A step on one device whose stages run as the pieces of their joint graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from raypipe.models import LayeredModel
from raypipe.runtime.compiled.compiler import InProcess, TracedStage
from raypipe.runtime.compiled.needs import Needs
from raypipe.runtime.compiled.program import Compiled, swap_in
from raypipe.runtime.executor.step import StageReport
from tests.runtime.runs.one_device import LR, OneDevice, Outcome, one_device


def interpreted(graph: fx.GraphModule, fake: object, backward: bool) -> Compiled:
    """Run a piece with PyTorch's own kernels, one operation after the other: what is tested is the cut."""
    return lambda values: graph(*values)


def compiled_device(
    model: LayeredModel, cut: list[range], rows: Mapping[str, Tensor], dtype: torch.dtype, microbatch: int,
    build: Any = interpreted, budget: float = 1.0, validates: bool = False, **variant: Any,
) -> tuple[OneDevice, list[TracedStage], list[StageReport]]:  # fmt: skip
    """A device whose stages are compiled where they can be; ``variant``: as ``one_device``'s."""
    made = one_device(model, cut, rows, dtype, microbatch, **variant)
    needs = Needs(made.executor, [made.program], 0, budget, (made.evaluate, 1) if validates else None)
    source = InProcess(made.executor, needs, build)
    reports = source.begin(list(made.executor.modules))
    outcome = source.find()
    swap_in(made.executor, {key: stage for key, stage, _ in outcome if stage is not None})
    return made, list(source.traced.values()), [*reports, *(report for *_, report in outcome)]


def step_of(made: OneDevice, step: int = 5) -> Outcome:
    """One training step; gradients are read off its plain SGD update."""
    before = {(s, n): p.detach().clone() for s, stage in enumerate(made.stages) for n, p in stage.named.items()}
    result = made.executor.run(made.program, step, LR)
    moved = {name: (old - made.stages[s].named[name].detach()) / LR for (s, name), old in before.items()}
    return Outcome(result.loss_sum, moved, made.stages)


def assert_same(a: Outcome, b: Outcome, tolerance: float = 1e-12, least: float = 1.0) -> None:
    """Loss and gradients agree, relative to the largest entry of each gradient, which counts as ``least`` or more."""
    assert abs(a.loss - b.loss) <= tolerance * max(1.0, abs(b.loss))
    assert a.gradients.keys() == b.gradients.keys()
    for name, gradient in b.gradients.items():
        worst = (a.gradients[name] - gradient).abs().max()
        assert worst <= tolerance * gradient.abs().max().clamp(min=least), f"{name}: {worst:.2e}"
