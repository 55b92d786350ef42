"""The pieces of a stage's joint graph give what the eager stage gives: losses and all gradients, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers
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


GPT = GptSpec(layers=4, hidden=16, heads=2, sequence=8, vocabulary=256, dropout=0.1, tie_embeddings=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance", "variant"),
    [
        (torch.float64, 1e-12, {"recompute": True, "recomputed": {1, 4}, "finest": True}),
        (torch.float64, 1e-12, {"recompute": True, "pairs": True}),
        (torch.float32, 1e-5, {"autocast": torch.bfloat16, "split": True}),
    ],
    ids=["segments", "pairs", "autocast"],
)
def test_segments_micro_batches_in_pairs_and_autocast(
    dtype: torch.dtype, tolerance: float, variant: dict[str, Any]
) -> None:
    """Segments are compiled one by one; two micro-batches in one forward run eagerly, and compiled in R."""
    model = GptLayers(GPT, dtype)
    ids = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    cut = even_cut(model, 2)
    made, traced, reports = compiled_device(model, cut, rows, dtype, 2, **variant)
    assert [report.reason for report in reports] == [None, None]
    spans = [set(stage.programs) for stage in made.executor.computation.compiled.values()]
    assert spans == [{(0, 1), (1, 2), (2, 3)}] * 2 if "finest" in variant else spans == [{None}] * 2
    lifted = any(joint.casts for stage in traced for _, joint, _ in stage.parts)
    assert lifted == ("autocast" in variant), "weights are cast once a step"
    assert_same(step_of(made), run_step(model, cut, rows, dtype, 2, **variant), tolerance)
