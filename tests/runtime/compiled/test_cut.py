"""The pieces of a stage's joint graph give what the eager stage gives: losses and all gradients, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.compiled.pieces import assert_same, compiled_device, step_of
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import CASES, DROPS, model_of

pytest.importorskip("transformers")
VARIANTS: dict[str, dict[str, Any]] = {
    "joint": {},
    "split": {"split": True},
    "recomputed": {"split": True, "recompute": True},
}


FEW = [("gpt2", "split"), ("bert", "joint"), ("cnn", "split"), ("half frozen", "recomputed")]
"""Products of both layouts and tied weights, masks and vectors, convolutions, frozen weights."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "variant"), FEW)
def test_pieces_give_the_eager_gradients(case: str, variant: str) -> None:
    model = model_of(case)
    rows = model.task.complete(CASES[case][1])
    cut = even_cut(model, 2)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, 2, **VARIANTS[variant])
    assert [report.reason for report in reports] == [None, None]
    eager = run_step(model, cut, rows, torch.float64, 2, **VARIANTS[variant])
    assert_same(step_of(made), eager)
    assert (case in DROPS) == any(program.places.own for stage in made.executor.computation.compiled.values()
                                  for some in stage.programs.values() for program in some)  # fmt: skip
