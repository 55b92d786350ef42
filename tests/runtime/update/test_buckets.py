"""Buckets of gradients are all-reduced while the last backward still runs, and never before they are complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update import buckets
from raypipe.runtime.update.buckets import buckets_of
from raypipe.runtime.update.gradients import GradientSync, TiedHolders, groups_of_ties
from raypipe.schedule.ir import Sharding
from tests.runtime.runs.one_device import TwoMembers, even_cut, run_step

SPEC = GptSpec(type="gpt", layers=3, hidden=16, heads=2, sequence=8, vocabulary=64, dropout=0.1, tie_embeddings=True)
ROWS = {"input_ids": torch.randint(64, (8, 8)), "shift_labels": torch.randint(64, (8, 8))}


class Done:
    """A finished collective."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self

    def add_done_callback(self, call: Any) -> None:
        call(self)


@dataclass
class Issued:
    """All-reduces as they were issued: the tensors, their values then, and how many weights had no gradient yet."""

    flats: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, flat: torch.Tensor, group: Any, async_op: bool) -> Done:
        self.flats.append(flat)
        self.values.append(flat.clone())
        return Done()


def test_buckets_are_filled_from_the_last_parameter_to_the_first(monkeypatch) -> None:
    monkeypatch.setattr("raypipe.runtime.update.buckets.FIRST_BUCKET_BYTES", 5)
    monkeypatch.setattr("raypipe.runtime.update.buckets.BUCKET_BYTES", 32)
    kinds = [(3, torch.float64), *((n, torch.float32) for n in (4, 2, 6, 1))]
    parameters = [nn.Parameter(torch.randn(n, dtype=dtype)) for n, dtype in kinds]
    buckets = buckets_of(parameters)
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == [[1], [6, 2], [4], [3]]
    for bucket in buckets:
        bucket.open()
        for p in bucket.parameters:
            assert p.grad is not None
            p.grad.fill_(p.numel())
    assert [bucket.flat.tolist() for bucket in buckets] == [[1], [6] * 6 + [2] * 2, [4] * 4, [3] * 3]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "variant", [{}, {"split": True}, {"recompute": True}, {"split": True, "recompute": True}], ids=str
)
def test_gradients_are_complete_when_their_all_reduce_starts(stages, variant, monkeypatch) -> None:
    model = GptLayers(SPEC, torch.float64)
    cut = even_cut(model, stages)
    alone = run_step(model, cut, ROWS, torch.float64, 2, **variant)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8 << 10)
    issued = Issued()
    monkeypatch.setattr(buckets.dist, "all_reduce", issued.all_reduce)
    groups = {f"stage {s}": TwoMembers() for s in range(stages)}
    summed = run_step(model, cut, ROWS, torch.float64, 2, groups=groups, **variant)
    assert len(issued.flats) > 3 * stages
    assert summed.loss == alone.loss
    assert summed.gradients.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(summed.gradients[name], gradient, rtol=0, atol=1e-12)


def test_a_parameter_tied_inside_a_stage_is_in_its_buckets() -> None:
    model = GptLayers(SPEC, torch.float64)
    name = "0.token.weight"
    parameters = tuple(dict.fromkeys(n for _, n in model.tied[0].parameters))
    placement = ((0,), (1,))
    inside, across = (TiedHolders(name, parameters, (0, 1), 0, stage) for stage in (0, None))
    assert groups_of_ties((across,), None) == {"tied 0.token.weight": (0, 1)}
    assert not groups_of_ties((inside,), None)
    assert groups_of_ties((inside,), Sharding(levels=(1,), copies=2)) == groups_of_ties((across,), None)
    module = StageModule(model, range(model.count), 3, torch.device("cpu"), False)
    sums = []
    for tie in (inside, across):
        sync = GradientSync(0, {(0, 0): module}, placement, (tie,), {"stage 0": TwoMembers()})
        sync.begin_step([(0, 0)])
        early = sync.early((0, 0))
        assert early is not None
        sums.append({id(p) for bucket in early.buckets for p in bucket.parameters})
    assert sums[0] - sums[1] == {id(module.named[name])}


@pytest.mark.parametrize("split", [False, True])
def test_all_reduces_start_before_the_last_backward_ends(split, monkeypatch) -> None:
    """When the first bucket goes out, the first layers have not had their last gradient yet."""
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8 << 10)
    issued, ends = Issued(), []
    sums: list[Any] = []
    result = buckets.BucketedAllReduce.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        result(self, *args, **kwargs)
        sums.append(self)

    def all_reduce(flat: torch.Tensor, group: Any, async_op: bool) -> Done:
        ends.append([bucket.flat.clone() for bucket in sums[0].buckets])
        return issued.all_reduce(flat, group, async_op)

    monkeypatch.setattr(buckets.BucketedAllReduce, "__init__", make)
    monkeypatch.setattr(buckets.dist, "all_reduce", all_reduce)
    model = GptLayers(SPEC, torch.float64)
    run_step(model, even_cut(model, 1), ROWS, torch.float64, 2, split=split, groups={"stage 0": TwoMembers()})
    first, last = ends[0], ends[-1]
    changed = [not torch.equal(a, b) for a, b in zip(first, last, strict=True)]
    assert not changed[0], "the first bucket was complete"
    assert sum(changed) >= len(changed) // 2, "most others were not"
    for number, value in enumerate(issued.values):
        assert torch.equal(value, last[number]), f"all-reduce {number} started too early"
