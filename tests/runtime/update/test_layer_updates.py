"""Layer by layer: a forward waits for the sums of the layers it has come to, and for no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from raypipe.cost.gpt_work import gpt_work
from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.runtime.backward import deferred
from raypipe.runtime.update import buckets
from tests.runtime.runs.one_device import LR, OneDevice, TwoMembers, even_cut, one_device

SPEC = GptSpec(type="gpt", layers=3, hidden=16, heads=2, sequence=8, vocabulary=64, dropout=0.1, tie_embeddings=False)
ROWS = {"input_ids": torch.randint(64, (8, 8)), "shift_labels": torch.randint(64, (8, 8))}


@dataclass
class Work:
    """A collective that nobody but ``wait`` completes."""

    waited: Callable[[], None]

    def wait(self) -> bool:
        self.waited()
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        return self

    def add_done_callback(self, call: Any) -> None:
        pass


@dataclass
class Log:
    """What happens, in order: bytes of the sums that are waited for, numbers of the layers that run."""

    events: list[tuple[str, int]] = field(default_factory=list)

    def all_reduce(self, flat: torch.Tensor, group: Any, async_op: bool, op: Any = None) -> Work:
        if op is not None:  # what the holders tell one another
            return Work(lambda: None)
        self.events.append(("issue", flat.numel()))
        return Work(lambda: self.events.append(("wait", flat.numel())))


def two_steps(log: Log, monkeypatch: pytest.MonkeyPatch, stages: int = 1, **variant: Any) -> OneDevice:
    """Start two steps, and ask for no result."""
    monkeypatch.setattr(buckets.dist, "all_reduce", log.all_reduce)
    model = GptLayers(SPEC, torch.float64)
    groups = {f"stage {s}": TwoMembers() for s in range(stages)}
    made = one_device(model, even_cut(model, stages), ROWS, torch.float64, 2, groups=groups, by_layer=True, **variant)
    layers = [block for stage in made.stages for block in stage.body.blocks]
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: log.events.append(("forward", number)))
    made.executor.start(made.program, 5, LR)
    log.events.append(("step", 6))
    made.executor.start(made.program, 6, LR)
    return made


@pytest.mark.parametrize("split", [False, True])
def test_each_layer_waits_for_its_own_sum_only(split, monkeypatch) -> None:
    log = Log()
    made = two_steps(log, monkeypatch, split=split)
    begin = log.events.index(("step", 6))
    sizes = [sum(p.numel() for p in block.parameters()) for block in made.stages[0].body.blocks]
    first = log.events[begin + 1 : begin + 1 + 2 * len(sizes)]
    assert first == [event for n, size in enumerate(sizes) for event in (("wait", size), ("forward", n))]
    issued = [size for what, size in log.events[:begin] if what == "issue"]
    assert issued == sizes[::-1], "at first as the backward completes them"


@pytest.mark.parametrize("variant", [{}, {"split": True}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_the_first_layers_follow_from_the_first_on(k, variant, monkeypatch) -> None:
    """Their sums start one by one while their weight gradients are computed, after all others."""
    log = Log()
    computed = deferred.accumulate_product

    def accumulate(weight: torch.Tensor, *rest: Any) -> None:
        log.events.append(("compute", weight.numel()))
        computed(weight, *rest)

    monkeypatch.setattr(deferred, "accumulate_product", accumulate)
    made = two_steps(log, monkeypatch, first_k=k, **variant)
    begin = log.events.index(("step", 6))
    sizes = [sum(p.numel() for p in block.parameters()) for block in made.stages[0].body.blocks]
    issued = [n for n, (what, _) in enumerate(log.events[:begin]) if what == "issue"]
    assert [log.events[n][1] for n in issued] == [*sizes[k:][::-1], *sizes[:k]]
    if k > 2:  # the second layer's products come between the sums of the first and the second
        first, second = issued[-k], issued[-k + 1]
        assert [what for what, _ in log.events[first + 1 : second]] == ["compute"] * 4
    if not variant:
        assert sum(what == "compute" for what, _ in log.events[:begin]) == 4 * max(0, min(k - 1, 3)) + (k == 5)


@pytest.mark.parametrize("k", [None, 0, 2, 5])
def test_updates_are_those_of_a_barrier(k, monkeypatch) -> None:
    made = two_steps(Log(), monkeypatch, stages=2, first_k=k)
    made.executor.updates.commit()
    model = GptLayers(SPEC, torch.float64)
    usual = one_device(model, even_cut(model, 2), ROWS, torch.float64, 2)
    for step in (5, 6):
        usual.executor.run(usual.program, step, LR)
    for own, other in zip(made.stages, usual.stages, strict=True):
        for name, value in other.named.items():
            torch.testing.assert_close(own.named[name], value, rtol=0, atol=1e-12, msg=name)


def test_large_buckets_are_summed_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(buckets, "PIECE_BYTES", 8 * 1000)
    log = Log()
    made = two_steps(log, monkeypatch)
    begin = log.events.index(("step", 6))
    issued = [size for what, size in log.events[:begin] if what == "issue"]
    assert max(issued) == 1000
    assert sum(issued) == sum(p.numel() for p in made.stages[0].parameters())


def test_norms_are_reported_when_they_are_known(monkeypatch) -> None:
    monkeypatch.setattr(buckets.dist, "all_reduce", Log().all_reduce)
    model = GptLayers(SPEC, torch.float64)
    results = []
    for variant in ({}, {"groups": {"stage 0": TwoMembers()}, "by_layer": True}):
        made = one_device(model, even_cut(model, 1), ROWS, torch.float64, 2, **variant)
        started = [made.executor.start(made.program, step, LR) for step in (5, 6)]
        results.append([one.result() for one in started])
    for usual, late in zip(*results, strict=True):
        assert late.norm_squared == pytest.approx(usual.norm_squared, rel=1e-12)
        assert late.loss_sum == usual.loss_sum


@pytest.mark.parametrize("by_layer", [True, False])
def test_an_executor_that_is_closed_leaves_no_cycles(by_layer, monkeypatch) -> None:
    """Workers freeze their objects, so what a cycle holds would live on: the modules, and the groups of a plan."""
    monkeypatch.setattr(buckets.dist, "all_reduce", Log().all_reduce)
    gc.collect()
    gc.disable()
    try:
        groups = {"stage 0": TwoMembers()}
        model = GptLayers(SPEC, torch.float64)
        made = one_device(model, even_cut(model, 1), ROWS, torch.float64, 2, groups=groups, by_layer=by_layer)
        made.executor.start(made.program, 0, LR)
        left = weakref.ref(groups["stage 0"]), weakref.ref(made.stages[0]), weakref.ref(made.executor)
        made.executor.close()
        del made, groups, model
        assert [what() for what in left] == [None, None, None]
    finally:
        gc.enable()


def test_what_a_postponed_gradient_waits_for_is_what_the_memory_model_counts(monkeypatch) -> None:
    """Both sides of every product of a GPT's layers, for the two samples of a micro-batch."""
    (stage,) = two_steps(Log(), monkeypatch, first_k=2).stages
    waiting = stage.queue.waiting
    assert waiting is not None
    result = [waiting.nbytes(layer) for layer in stage.trained_by_block]
    counted = [work.waiting_bytes for work in gpt_work(SPEC, "float64")]
    positions = 8 * SPEC.sequence * (1 + SPEC.hidden)  # one sequence of them for all samples, which is not counted
    assert result == [2 * (each or 0.0) + (positions if n == 0 else 0) for n, each in enumerate(counted)]
