"""Compiled stages whose tasks are graphs, on recorded graphs: the numbers of the same stages without graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.models import GptLayers, keyed_random
from raypipe.runtime.compiled.program import CompiledPiece, CompiledStage, StageProgram
from raypipe.runtime.graphs.tasks import FixedGradients, Slot, TaskGraphs
from raypipe.runtime.update.buckets import FlatGradients
from tests.exhaustive import exhaustive
from tests.runtime.compiled.pieces import compiled_device
from tests.runtime.graphs.recorded import FreedMemoryError, RecordedGraphs
from tests.runtime.runs.one_device import LR, OneDevice, even_cut

pytestmark = pytest.mark.slow
SPEC = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=64, dropout=0.1, tie_embeddings=True)
STEPS = 3
F32 = {"dtype": torch.float32, "autocast": torch.bfloat16}
VARIANTS: dict[str, dict[str, Any]] = {
    "joint": {}, "split": {"split": True}, "recomputed": {"recompute": True},
    "recomputed, split": {"recompute": True, "split": True}, "forwards in pairs": {"recompute": True, "pairs": True},
    "autocast": F32, "autocast, split": {**F32, "split": True},
    "some layers recomputed": {"recompute": True, "recomputed": {1, 3}},
}  # fmt: skip
DAILY = ("joint", "split", "autocast, split", "some layers recomputed")


@cache
def compiled(name: str) -> tuple[OneDevice, dict[Any, Any], list[torch.Tensor]]:
    """A device with compiled stages, and its parameters at first."""
    dtype = VARIANTS[name].get("dtype", torch.float64)
    model = GptLayers(SPEC, dtype)
    ids = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    made, _, reports = compiled_device(
        model, even_cut(model, 2), rows, **{"dtype": dtype, "microbatch": 2, **VARIANTS[name]}
    )
    assert [report.reason for report in reports] == [None, None]
    ready: dict[Any, Any] = made.executor.computation.compiled
    assert all(isinstance(stage, CompiledStage) for stage in ready.values())
    return made, ready, [p.detach().clone() for stage in made.stages for p in stage.parameters()]


def device(name: str) -> OneDevice:
    """That device as it was at first, without graphs."""
    made, ready, values = compiled(name)
    made.executor.forget()
    made.executor.p2p_buffers.clear()
    made.executor.computation.compiled = dict(ready)
    with torch.no_grad():
        for parameter, value in zip((p for stage in made.stages for p in stage.parameters()), values, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    return made


def programs(made: OneDevice) -> Iterator[StageProgram]:
    stages: Any = made.executor.computation.compiled.values()
    return (program for stage in stages for some in stage.programs.values() for program in some)


def with_graphs(made: OneDevice) -> tuple[RecordedGraphs, TaskGraphs]:
    graphs = RecordedGraphs()
    tasks = TaskGraphs(graphs)
    ready: Any = made.executor.computation.compiled
    made.executor.computation.compiled = dict(tasks.captured(made.executor, ready))
    return graphs, tasks


@cache
def plain(name: str) -> Any:
    """What ``trained`` finds without graphs."""
    return trained(device(name))


def trained(made: OneDevice, steps: range = range(STEPS)) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and norms; parameters at the end."""
    results = [made.executor.run(made.program, step, LR * 1e-2 / (1 + step)) for step in steps]
    values = {f"{s} {n}": p.detach().clone() for s, stage in enumerate(made.stages) for n, p in stage.named.items()}
    return [(r.loss_sum, r.norm_squared) for r in results], values


def assert_same(a: Any, b: Any) -> None:
    assert a[0] == b[0]
    assert all(torch.equal(value, b[1][name]) for name, value in a[1].items())


@pytest.mark.parametrize("name", [*DAILY, *exhaustive(*(name for name in VARIANTS if name not in DAILY))])
def test_the_numbers_of_the_same_stages_without_graphs(name: str) -> None:
    expected, made = plain(name), device(name)
    graphs, tasks = with_graphs(made)
    first, _ = trained(made, range(1))
    captures = graphs.captures
    rest, values = trained(made, range(1, STEPS))
    assert graphs.captures == captures > 0, "captured in the first step, and not again"
    assert_same((first + rest, values), expected)
    assert tasks.take_notes() == ()


def test_stages_that_ran_eagerly_before() -> None:
    expected, made = plain("split"), device("split")
    first, _ = trained(made, range(1))
    with_graphs(made)
    rest, values = trained(made, range(1, STEPS))
    assert_same((first + rest, values), expected)


def test_parameters_that_moved_are_captured_again() -> None:
    expected, made = plain("split"), device("split")
    graphs, _ = with_graphs(made)
    first, _ = trained(made, range(1))
    before = graphs.captures
    for stage in made.stages:
        for parameter in stage.parameters():
            parameter.data = parameter.data.clone()
    rest, values = trained(made, range(1, STEPS))
    assert_same((first + rest, values), expected)
    assert graphs.captures == 2 * before


def test_counters_of_dropout_outlive_their_cache() -> None:
    expected, made = plain("joint"), device("joint")
    with_graphs(made)
    first, _ = trained(made, range(1))
    keyed_random._finalised.cache_clear()
    rest, values = trained(made, range(1, STEPS))
    assert_same((first + rest, values), expected)


def test_a_step_that_is_broken_off_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, made = plain("split"), device("split")
    graphs, _ = with_graphs(made)
    first, _ = trained(made, range(1))
    captures, handlers = graphs.captures, made.executor.handlers

    def breaks(executor: Any, action: Any) -> None:
        raise ArithmeticError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(made.executor, "handlers", {**handlers, "B": breaks})
        with pytest.raises(ArithmeticError):
            trained(made, range(1, 2))
    made.executor.forget()
    made.executor.p2p_buffers.clear()
    rest, values = trained(made, range(1, STEPS))
    assert_same((first + rest, values), expected)
    assert graphs.captures == captures


@pytest.mark.parametrize(
    ("piece", "told"), [("forward", "F"), ("input_grad", "B"), ("weight_grad", "W"), ("backward", "BW")]
)
def test_a_task_that_cannot_be_captured_runs_uncaptured_and_is_told_once(
    piece: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "joint" if piece == "backward" else "split"
    expected, made = plain(name), device(name)
    for program in programs(made):
        one: CompiledPiece = getattr(program.pieces, piece)

        def reads(values: list[torch.Tensor], run: Any = one.run) -> Any:
            values[-1].sum().item()
            return run(values)

        monkeypatch.setattr(program, "pieces", replace(program.pieces, **{piece: CompiledPiece(one.piece, reads)}))
    graphs, tasks = with_graphs(made)
    assert_same(trained(made), expected)
    notes = [note.partition(": ")[0] for note in tasks.take_notes()]
    assert sorted(notes) == [f"{told} of stage {stage} runs compiled, and not as a CUDA graph" for stage in (0, 1)]
    assert tasks.take_notes() == ()
    assert (graphs.captures == 0) == (piece == "forward")


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    FAULTS[plant.__name__.replace("_", " ")] = plant
    return plant


@fault
def inputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Slot.forward

    def forward(self: Slot, given: Any, keeps: bool) -> Any:
        return plain(self, self._given if self._forward is not None else given, keeps)

    monkeypatch.setattr(Slot, "forward", forward)


@fault
def tangents_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Slot.take
    monkeypatch.setattr(Slot, "take", lambda self, given: None if self._tangents else plain(self, given))


@fault
def all_micro_batches_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(self: Any, slot: Slot, free: list[Slot]) -> None:
        self.slot, self._free = slot, []
        free.append(slot)

    monkeypatch.setattr("raypipe.runtime.graphs.tasks.Lease.__init__", share)


@fault
def slots_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    plain = RecordedGraphs.new_pool

    def one(self: RecordedGraphs) -> Any:
        pools[:] = pools or [plain(self)]
        return pools[0]

    monkeypatch.setattr(RecordedGraphs, "new_pool", one)


@fault
def outputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Slot.forward

    def forward(self: Slot, given: Any, keeps: bool) -> Any:
        made = plain(self, given, keeps)
        return [y.view_as(y) for y in self._made[: len(made)]]

    monkeypatch.setattr(Slot, "forward", forward)


@fault
def gradients_lie_elsewhere_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FixedGradients.open

    def forgets(self: FixedGradients, parameters: Any) -> Any:
        if all(p.grad is None for p in parameters):
            self._kept = [*getattr(self, "_kept", []), dict(self._own)]  # so that no memory is freed
            self._own.clear()
        return plain(self, parameters)

    monkeypatch.setattr(FixedGradients, "open", forgets)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = "joint" if name == "slots share a pool" else "split"
    expected = plain(variant)
    FAULTS[name](monkeypatch)
    made = device(variant)
    with_graphs(made)
    with pytest.raises((AssertionError, FreedMemoryError, RuntimeError)):
        assert_same(trained(made), expected)


def test_flat_gradients_that_last() -> None:
    p = torch.nn.Parameter(torch.ones(2, 3))
    flat = FlatGradients([p])
    flat.lasting = True
    for _ in range(2):
        flat.open()
        assert p.grad is not None
        assert torch.equal(p.grad, torch.zeros(2, 3))
        before = p.grad
        p.grad.add_(1)
        flat.close()
        assert p.grad is None
    flat.open()
    assert p.grad is before


def test_gradients_of_eager_micro_batches_are_taken_in() -> None:
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    fixed = FixedGradients()
    fixed.open([p, q])
    p.grad, q.grad = torch.full((3,), 2.0), None
    first = fixed.open([p, q])
    assert [x.tolist() for x in first] == [[2.0] * 3, [0.0] * 3]
    assert [p.grad is first[0], q.grad is first[1]] == [True, True]
