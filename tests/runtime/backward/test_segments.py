"""Part of a stage's layers computed again: the same gradients, and memory for the others only."""

from __future__ import annotations

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.backward.segments import Segment, parts_of, segments_of
from tests.runtime.backward.test_stack import assert_same
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import CASES, MICROBATCH, model_of


def test_neighbours_of_one_kind_are_one_segment() -> None:
    parts = parts_of([2, 3, 4, 5, 6], {4, 5}, finest=False)
    assert parts == [[2, 3], [4, 5], [6]]
    gives = [(True,), (True, False)]
    assert segments_of(parts, {4, 5}, gives) == (
        Segment(0, 1, False, (True,)), Segment(1, 2, True, (True, False)), Segment(2, 3, False, ()),
    )  # fmt: skip
    fine = parts_of([2, 3, 4], None, finest=True)
    assert segments_of(fine, {3, 4}, [(True,)] * 2) == (Segment(0, 1, False, (True,)), Segment(1, 3, True, ()))
    assert segments_of(fine, None, [(True,)] * 2) == (Segment(0, 3, True, ()),)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", ["gpt2", "t5", "cnn"])
@pytest.mark.parametrize("which", ["last", "first", "every second"])
def test_gradients_are_those_of_keeping_everything(case, which, split) -> None:
    """Dropout, several tensors at a cut, raw inputs read by later segments, tied parameters in two of them."""
    model = model_of(case)
    rows = model.task.complete(CASES[case][1])
    cut = even_cut(model, 2)
    begin, step = {"last": (1, 1), "first": (0, 1), "every second": (0, 2)}[which]
    recomputed = {i for part in cut for i in (list(part)[begin::step] if which != "first" else list(part)[:1])}
    plain = run_step(model, cut, rows, torch.float64, MICROBATCH, split=split)
    assert_same(
        run_step(model, cut, rows, torch.float64, MICROBATCH, split=split, recompute=True, recomputed=recomputed), plain
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("finest", [False, True])
def test_of_the_built_in_model_on_one_stage(split, finest) -> None:
    """Its first and last layer hold one matrix, in different segments."""
    spec = GptSpec(layers=3, hidden=16, heads=2, sequence=8, vocabulary=32, dropout=0.2)
    model = GptLayers(spec, torch.float64)
    ids = torch.randint(32, (4, 9))
    rows = {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}
    plain = run_step(model, even_cut(model, 1), rows, torch.float64, 1, split=split)
    made = run_step(
        model, even_cut(model, 1), rows, torch.float64, 1, split=split, recompute=True, recomputed={1, 3}, finest=finest
    )
    assert_same(made, plain)
    assert made.stages[0].named.keys() == plain.stages[0].named.keys()
    assert sum(p.numel() for p in made.stages[0].parameters()) == sum(p.numel() for p in plain.stages[0].parameters())
