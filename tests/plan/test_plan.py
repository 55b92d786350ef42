"""Plans held against the batch: no plan, stored, resumed or edited, trains with a sample left out or counted twice."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raypipe.errors import RequestError, ScheduleError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import base_schedule
from raypipe.plan.plan import Plan, build_schedule, forward_only
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Program, check_counted, programs, step_programs

FAMILIES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "gpipe": {}, "zb-h1": {}, "zb-v": {}, "interleaved-1f1b": {"chunks": 2}, "chimera": {},
    "chimera-halved": {"concat": "halving"}, "early-recompute": {}, "pipedream": {}, "pipedream-2bw": {},
    "fast-forward": {},
}  # fmt: skip


def spec(family: str, **keys: Any) -> ParallelSpec:
    name = "chimera" if family == "chimera-halved" else family
    return ParallelSpec(schedule=name, **FAMILIES[family], **keys)


def stored(parallel: ParallelSpec, batch: int, text: str | None = None, name: str = "auto") -> Plan:
    """A plan that holds its order, as a search or a planner's choice does."""
    schedule = base_schedule(parallel, batch)
    cut = tuple((s,) for s in range(schedule.stages))
    return Plan(parallel=parallel.model_copy(update={"schedule": name}), cut=cut, order=text or to_text(schedule))


def counted(schedule: Schedule, samples: Fraction, batch: int) -> list[Counter[int]]:
    """What each step in a row, and then a validation batch, counts of each sample on each stage, by brute force.

    A sample of a step is (step, stage, sample); of training steps also what the weights learn from.
    """
    parts = step_programs(schedule)
    train = [WHOLE] * 3 if set(parts) == {WHOLE} else [(True, False), (False, False), (False, True)]
    assert samples.denominator == 1
    found: list[Counter[Any]] = []
    for kinds in (("F",), ("W", "BW")):
        seen: Counter[Any] = Counter()
        for step, part in enumerate(train):
            _count(seen, parts[part], kinds, step, int(samples), schedule.microbatches)
        found.append(seen)
    seen = Counter()
    _count(seen, programs(forward_only(schedule)), ("F",), 0, int(samples), schedule.microbatches)
    return [*found, seen]


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
    """A plan made for one batch, with its order perhaps stored and edited, and the batch that it is asked to train."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    stages, replicas = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    microbatch = draw(st.integers(1, 4))
    parallel = spec(family, stages=stages, replicas=replicas, microbatch=microbatch)
    unit = microbatch * replicas
    planned, asked = (unit * draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2))
    try:
        plan = stored(parallel, planned)
    except ScheduleError:  # this family has no such shape
        plan = stored(spec("1f1b", stages=stages, replicas=replicas, microbatch=microbatch), planned)
    assert plan.order is not None
    how = draw(st.sampled_from(["generated", "stored", "edited"]))
    text = draw(edits(plan.order)) if how == "edited" else plan.order
    name = draw(st.sampled_from(["auto", parallel.schedule])) if how != "generated" else parallel.schedule
    changed = {
        "order": None if how == "generated" else text,
        "parallel": parallel.model_copy(update={"schedule": name}),
    }
    if draw(st.booleans()):
        changed["parallel"] = changed["parallel"].model_copy(update={"replicas": draw(st.integers(1, 2))})
    return plan.model_copy(update=changed), draw(st.sampled_from([planned, asked]))


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
        lowered = step_programs(schedule), programs(forward_only(schedule))
        check_counted(*lowered, schedule)
    except RequestError:
        return
    forwards, gradients, validation = counted(schedule, plan.parallel.microbatch * schedule.size, batch)
    assert forwards == gradients == once(schedule, batch, 3)
    assert validation == once(schedule, batch, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_order_is_taken_for_the_batch_that_it_was_made_for(family: str) -> None:
    parallel = spec(family, stages=2, microbatch=4)
    plan = stored(parallel, 16, name=parallel.schedule)
    schedule = build_schedule(plan, 16)
    forwards, gradients, _ = counted(schedule, plan.parallel.microbatch * schedule.size, 16)
    assert forwards == gradients == once(schedule, 16, 3)


def test_a_stored_order_of_another_batch_says_which_batch_it_is_for() -> None:
    with pytest.raises(ScheduleError) as refused:
        build_schedule(stored(FOUR, 16), 64)
    assert refused.value.where == "plan: order"
    assert "16 sequences" in refused.value.why
    assert "train.batch is 64" in refused.value.why
    assert "train.batch to 16" in refused.value.fix


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("microbatches 0", "the step has no micro-batches"),
        ("microbatches 3", "12 sequences"),
        ("size 1/2", "8 sequences"),
        ("edges", "not a chain"),
        ("versions 2bw", "has versions 2bw"),
    ],
)
def test_an_edited_order_is_held_against_the_job(line: str, why: str) -> None:
    text = stored(FOUR, 16).order
    assert text is not None
    kept = [each for each in text.splitlines() if each.split()[0] != line.split()[0]]
    with pytest.raises(ScheduleError, match=why):
        build_schedule(stored(FOUR, 16, "\n".join([line, *kept])), 16)


def test_an_order_of_other_devices_or_stages_than_the_plan_is_refused() -> None:
    plan = stored(ParallelSpec(stages=4, microbatch=4), 16)
    two = plan.model_copy(update={"parallel": FOUR.model_copy(update={"schedule": "auto"})})
    with pytest.raises(ScheduleError, match="devices"):
        build_schedule(two, 16)
    with pytest.raises(ScheduleError, match="4 stages, the plan's cut 2"):
        build_schedule(two.model_copy(update={"cut": ((0, 1), (2, 3))}), 16)


class LaterParallelSpec(ParallelSpec):
    """That of a later raypipe."""

    new: int = 3


def test_a_plan_from_before_a_key_existed_was_not_edited() -> None:
    settings = {"schedule": "1f1b", "stages": 2}
    plan = Plan(parallel=ParallelSpec.model_validate(settings), cut=((0, 1), (2, 3)))

    def digest(**changes: Any) -> str:
        return plan.model_copy(update=changes)._decision()

    later = LaterParallelSpec.model_validate(settings)
    assert digest(parallel=later) == digest()
    assert digest(parallel=later.model_copy(update={"new": 4})) != digest()
    edits = [digest(parallel=later.model_copy(update=change))
             for change in ({"innermost": "replicas"}, {"microbatch": 3}, {"alphas": 0.5})]  # fmt: skip
    edits += [digest(cut=((0,), (1, 2, 3))), digest(order="0F0")]
    assert len({digest(), *edits}) == 6
