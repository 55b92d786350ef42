"""Plans held against the batch: no plan, stored, resumed or edited, trains with a sample left out or counted twice."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raypipe.errors import RequestError, ScheduleError, SpecError
from raypipe.job import requested_schedule
from raypipe.job.parallel_spec import ParallelSpec, zero_level
from raypipe.job.requested_schedule import Cut, base_schedule
from raypipe.plan import plan as plan_module
from raypipe.plan.plan import Plan, build_schedule, load_plan, with_recompute
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Program, check_counted, programs, step_programs
from raypipe.schedule.passes import (
    add_updates,
    closed_up,
    forwards_alone,
    place_gradient_sync,
    replicate,
    shard,
    without_frozen,
)
from raypipe.schedule.passes.sync import placement_of
from raypipe.schedule.verify import verify

FAMILIES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "gpipe": {}, "zb-h1": {}, "zb-v": {}, "interleaved-1f1b": {"chunks": 2}, "chimera": {},
    "chimera-halved": {"concat": "halving"}, "early-recompute": {}, "pipedream": {}, "pipedream-2bw": {},
    "fast-forward": {}, "zeropp": {"chunks": 2, "unit": 2},
}  # fmt: skip


def spec(family: str, **keys: Any) -> ParallelSpec:
    name = "chimera" if family == "chimera-halved" else family
    return ParallelSpec(schedule=name, **FAMILIES[family], **keys)


def stored(parallel: ParallelSpec, batch: int, text: str | None = None, name: str = "auto") -> Plan:
    """A plan of an order that was searched for; ``text``: edited to this program."""
    schedule = base_schedule(parallel, batch)
    cut = tuple((s,) for s in range(schedule.stages))
    plan = Plan.of(parallel.model_copy(update={"schedule": name}), cut, batch, schedule)
    return plan if text is None else plan.model_copy(update={"program": text})


def counted(schedule: Schedule, samples: Fraction, batch: int) -> list[Counter[int]]:
    """What each step in a row, and then a validation batch, counts of each sample on each stage, by brute force.

    A sample of a step is (step, stage, sample); of training steps also what the weights learn from.
    """
    parts = step_programs(schedule)
    train = [WHOLE] * 3 if set(parts) == {WHOLE} else [(True, False), (False, False), (False, True)]
    assert samples.denominator == 1
    result: list[Counter[Any]] = []
    for kinds in (("F",), ("W", "BW")):
        seen: Counter[Any] = Counter()
        for step, part in enumerate(train):
            _count(seen, parts[part], kinds, step, int(samples), schedule.microbatches)
        result.append(seen)
    seen = Counter()
    _count(seen, programs(forwards_alone(schedule)), ("F",), 0, int(samples), schedule.microbatches)
    return [*result, seen]


def _count(
    seen: Counter[Any], rows: list[Program], kinds: tuple[str, ...], step: int, samples: int, microbatches: int
) -> None:
    for program in rows:
        for action in program.actions:
            if action.task.kind in kinds:
                for mb in action.task.mbs:
                    ahead, of_step = divmod(mb, microbatches)
                    at = range(of_step * samples, (of_step + 1) * samples)
                    seen.update((step + ahead, action.task.stage, sample) for sample in at)


def once(schedule: Schedule, batch: int, steps: int) -> Counter[Any]:
    return Counter((k, s, i) for k in range(steps) for s in range(schedule.stages) for i in range(batch))


@st.composite
def edits(draw: Any, text: str) -> str:
    """An order as somebody might edit it: tasks dropped, doubled, moved, renumbered, or a line changed."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        head, *words = lines[at].split()
        if head == "device":
            tasks = words[1:]
            what = draw(st.sampled_from(["drop", "double", "swap", "empty", "renumber", "replica"]))
            k = draw(st.integers(0, max(0, len(tasks) - 1)))
            if what == "empty" or not tasks:
                tasks = []
            elif what == "drop":
                del tasks[k]
            elif what == "double":
                tasks.insert(draw(st.integers(0, len(tasks))), tasks[k])
            elif what == "swap":
                j = draw(st.integers(0, len(tasks) - 1))
                tasks[j], tasks[k] = tasks[k], tasks[j]
            elif what == "renumber":
                tasks[k] = tasks[k].rstrip("0123456789,") + str(draw(st.integers(0, 9)))
            else:
                tasks[k] += "@1"
            lines[at] = " ".join([head, words[0], *tasks])
        else:
            extra = ["size 1/2", "size 1/3", "versions stash", "versions 2bw", "skip_first_B", "edges 0>1", "edges"]
            numbers = [f"microbatches {n}" for n in (0, 1, 2, 4, 6, 8)]
            new = draw(st.sampled_from([*extra, *numbers]))
            lines = [line for line in lines if line.split()[0] != new.split()[0]]
            lines.insert(1, new)
    return "\n".join(lines) + "\n"


@st.composite
def plans(draw: Any) -> tuple[Plan, int]:
    """A plan made for one batch, perhaps edited, and the batch that it is asked to train."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    stages, replicas = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    microbatch = draw(st.integers(1, 4))
    parallel = spec(family, stages=stages, replicas=replicas, microbatch=microbatch)
    unit = microbatch * replicas
    planned, asked = (unit * draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2))
    try:
        plan = stored(parallel, planned, name=draw(st.sampled_from(["auto", parallel.schedule])))
    except ScheduleError:  # this family has no such shape
        plan = stored(spec("1f1b", stages=stages, replicas=replicas, microbatch=microbatch), planned)
    if draw(st.booleans()):
        plan = plan.model_copy(update={"program": draw(edits(plan.program))})
    if draw(st.booleans()):
        plan = plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"replicas": 2})})
    return plan, draw(st.sampled_from([planned, asked]))


FOUR = ParallelSpec(stages=2, microbatch=4)


@pytest.mark.slow
@settings(max_examples=300)
@given(plans())
@example((stored(FOUR, 16), 64))
@example((stored(FOUR, 16), 8))
@example((stored(FOUR, 16, "microbatches 0\nplacement 0 1\ndevice 0:\ndevice 1:\n"), 16))
def test_a_plan_is_refused_or_counts_every_sample_once(made: tuple[Plan, int]) -> None:
    plan, batch = made
    try:
        schedule = build_schedule(plan, batch)
        lowered = step_programs(schedule), programs(forwards_alone(schedule))
        check_counted(*lowered, schedule)
    except RequestError:
        return
    forwards, gradients, validation = counted(schedule, plan.parallel.microbatch * schedule.size, batch)
    assert forwards == gradients == once(schedule, batch, 3)
    assert validation == once(schedule, batch, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_is_taken_for_the_batch_that_it_was_made_for(family: str) -> None:
    parallel = spec(family, stages=2, microbatch=4)
    plan = stored(parallel, 16, name=parallel.schedule)
    schedule = build_schedule(plan, 16)
    forwards, gradients, _ = counted(schedule, plan.parallel.microbatch * schedule.size, 16)
    assert forwards == gradients == once(schedule, 16, 3)


def test_a_program_of_another_batch_says_which_batch_it_is_for() -> None:
    with pytest.raises(ScheduleError) as refused:
        build_schedule(stored(FOUR, 16), 64)
    assert refused.value.where == "plan: program"
    assert "16 sequences" in refused.value.why
    assert "train.batch is 64" in refused.value.why
    assert "train.batch to 16" in refused.value.fix


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("microbatches 0", "has 0 microbatches, the job 4"),
        ("microbatches 3", "12 sequences"),
        ("size 1/2", "8 sequences"),
        ("edges", "not a chain"),
        ("versions 2bw", "has versions 2bw"),
    ],
)
def test_an_edited_program_is_held_against_the_job(line: str, why: str) -> None:
    text = stored(FOUR, 16).program
    kept = [each for each in text.splitlines() if each.split()[0] != line.split()[0]]
    with pytest.raises(ScheduleError, match=why):
        build_schedule(stored(FOUR, 16, "\n".join([line, *kept])), 16)


def test_a_program_of_other_devices_or_stages_than_the_plan_is_refused() -> None:
    plan = stored(ParallelSpec(stages=4, microbatch=4), 16)
    two = stored(FOUR, 16).model_copy(update={"program": plan.program, "cut": plan.cut})
    with pytest.raises(ScheduleError, match="devices"):
        build_schedule(two, 16)
    with pytest.raises(ScheduleError, match="4 stages, the plan's cut 2"):
        build_schedule(two.model_copy(update={"cut": ((0, 1), (2, 3))}), 16)


@pytest.mark.parametrize(
    ("parallel", "old", "new", "why"),
    [
        ({}, " 0U", "", "has no 0U"),
        ({"replicas": 2, "sync": "eager"}, " 1AR", "", "has no 1AR"),
        ({}, " 0U", " 0AR 0U", "has a 0AR"),
        ({"replicas": 2, "shard": "zero1"}, "zero 1 1", "zero 2 2", "divides zero2, the job zero1"),
        ({"replicas": 2, "shard": "zero1"}, "zero 1 1\n", "zero 1 1\nshard_group 1\n", "shard groups of 1"),
        ({}, "device 1: ", "device 2: ", "has 3 devices, the job 2"),
        ({}, "device 1: 1F0", "device 1: 1Q0", "unknown kind"),
    ],
)
def test_a_program_that_is_no_whole_step_of_its_plan(parallel: dict[str, Any], old: str, new: str, why: str) -> None:
    plan = Plan.of(ParallelSpec(stages=2, microbatch=2, **parallel), ((0,), (1,)), 16)
    assert build_schedule(plan, 16)
    assert old in plan.program
    with pytest.raises(ScheduleError, match=why):
        build_schedule(plan.model_copy(update={"program": plan.program.replace(old, new)}), 16)


def test_edited_keys_are_refused_where_the_program_was_made_of_them() -> None:
    plan = stored(FOUR, 16)
    for key, value in ({"sync": "eager", "microbatch": 2, "update": "wait"}).items():
        with pytest.raises(ScheduleError, match="was edited"):
            build_schedule(plan.model_copy(update={"parallel": plan.parallel.model_copy(update={key: value})}), 16)
    own = plan.parallel.model_copy(update={"transport": "gloo"})  # the job's own, whatever the plan
    assert build_schedule(plan.model_copy(update={"parallel": own}), 16) == build_schedule(plan, 16)


def test_a_plan_of_the_first_format_is_refused_with_the_command_that_makes_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    old = {"format": 1, "parallel": {"schedule": "1f1b", "stages": 2}, "cut": [[0], [1]], "order": None, "frozen": []}
    path.write_text(json.dumps(old))
    with pytest.raises(SpecError) as refused:
        load_plan(path)
    assert refused.value.where == f"{path}: format"
    assert "raypipe autoconfigure JOB.yaml -o PLAN.json" in refused.value.fix


VARIANTS: list[dict[str, Any]] = [
    {}, {"replicas": 2}, {"replicas": 3, "sync": "eager"}, {"replicas": 2, "sync": "eager-opt"},
    {"replicas": 2, "sync": "prioritised"}, {"recompute": "full"}, {"recompute": [0], "replicas": 2},
    {"replicas": 4, "shard": "zero3", "shard_replicas": 2}, {"replicas": 2, "shard": "zero2", "recompute": "full"},
    {"replicas": 2, "shard": "zero3", "gather": "microbatch", "sync": "eager"}, {"replicas": 2, "shard": "zero1"},
]  # fmt: skip


def generated(parallel: ParallelSpec, cut: Cut, batch: int, frozen: Collection[int]) -> Schedule:
    """The step over all devices as it was made of the keys in each run before plans held programs: all copies first."""
    one = without_frozen(base_schedule(parallel, batch), frozen)
    one = with_recompute(closed_up(one) if frozen and parallel.shard == "none" else one, parallel, cut)
    every, level = replicate(one, parallel.replicas), zero_level(parallel.shard)
    if level:
        keys = {"unit": parallel.unit, "copies": parallel.replicas, "group": parallel.shard_replicas}
        every = shard(every, level, gather=parallel.gather, **keys)
    return add_updates(place_gradient_sync(every, placement_of(parallel.sync)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_program_is_what_the_generator_gave(family: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every schedule, depth, number of micro-batches and way to sum, divide, recompute and freeze."""
    made: list[tuple[Plan, int, Schedule]] = []
    for keys, count, freeze in itertools.product(VARIANTS, (1, 6), (False, True)):
        parallel = spec(family, stages=stages, microbatch=2, **keys)
        batch = 2 * count * parallel.replicas
        try:
            depth = base_schedule(parallel, batch).stages
            cut = tuple((s,) for s in range(depth))
            frozen = (0,) if freeze and depth > 1 else ()
            expected = generated(parallel, cut, batch, frozen)
            verify(expected)
        except ScheduleError:  # this family has no such shape
            continue
        plan = Plan.model_validate_json(Plan.of(parallel, cut, batch, frozen=frozen).text())
        assert build_schedule(plan, batch) == expected
        assert from_text(to_text(plan.one_copy())) == plan.one_copy()
        assert to_text(plan.one_copy()) == plan.program
        assert plan.remade(batch) == plan
        made.append((plan, batch, expected))
    assert bool(made) == (stages > 1 or not family.startswith("chimera"))

    def changed(*_: object, **__: object) -> Schedule:
        raise AssertionError("a plan is not made again")

    for name in ("base_schedule", "place_gradient_sync", "add_updates", "add_recompute", "closed_up", "shard"):
        monkeypatch.setattr(plan_module, name, changed)
    monkeypatch.setattr(requested_schedule, "generate", changed)
    assert all(build_schedule(plan, batch) == expected for plan, batch, expected in made)


class LaterParallelSpec(ParallelSpec):
    """That of a later raypipe."""

    new: int = 3


def test_a_plan_from_before_a_key_existed_was_not_edited() -> None:
    settings = {"schedule": "1f1b", "stages": 2}
    plan = Plan.of(ParallelSpec.model_validate(settings), ((0, 1), (2, 3)), 2)

    def digest(**changes: Any) -> str:
        return plan.model_copy(update=changes)._decision()

    later = LaterParallelSpec.model_validate(settings)
    assert digest(parallel=later) == digest()
    assert digest(parallel=later.model_copy(update={"new": 4})) != digest()
    edits = [digest(parallel=later.model_copy(update=change))
             for change in ({"innermost": "replicas"}, {"microbatch": 3}, {"alphas": 0.5})]  # fmt: skip
    edits += [digest(cut=((0,), (1, 2, 3))), digest(program="0F0")]
    assert len({digest(), *edits}) == 6
