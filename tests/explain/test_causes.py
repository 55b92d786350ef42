"""Lost time by cause: steps in which the answer is known, and random ones, whose causes sum to what is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raypipe.explain.causes import Explanation, explain
from raypipe.explain.measured import Measured, TaskTimes, task_times
from raypipe.explain.replay import Replay
from raypipe.plan.online.recorded_steps import RecordedStep, StepWaits
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.passes import add_recompute, add_updates, shard
from tests.explain.simulated_steps import message_waits, run_steps, uneven, whole_step

EVEN = CostTable.even(4)
"""F = B = W = 1, so a micro-batch takes a stage 3."""


def explanation(
    schedule: Schedule, steps: tuple[RecordedStep, ...], norm: NormPolicy = "wait", planned: TaskTimes | None = None
) -> Explanation:
    result = explain(Replay(Measured(schedule=schedule, steps=steps, norm=norm, planned=planned or {})))
    assert sum(c.seconds for c in result.causes) == pytest.approx(result.step_s - result.ideal_s, abs=1e-9)
    return result


def seconds(found: Explanation) -> dict[str, float]:
    return {c.cause: pytest.approx(c.seconds, abs=1e-6) for c in found.causes}


def _devices(schedule: Schedule) -> list[int]:
    return [d for d, order in enumerate(schedule.orders) for _ in order]


FOUR = whole_step("1f1b", devices=4, microbatches=8)
ON_ONE = [i for i, d in enumerate(_devices(FOUR)) if d == 1][4:10]
SLOW_LINK = replace(EVEN, comm=(0.0, 1.5, 0.0, 0.0))
ONE_LONG = uneven([1, 1, 2, 1])
PROFILED = task_times(FOUR, CostTable.even(4, 10.0, 10.0, 10.0))  # only proportions count
LATE_SAMPLES = StepWaits(data_s=(6.0, 0.0, 0.0, 0.0))

STEPS = {
    # the steps; the cause and device at fault, the step without it (and what it loses, where that is known at once)
    "its fill and drain": (run_steps(FOUR, EVEN), None, ("warm-up", None), 24.0, 9.0),
    "one step from its own start": (run_steps(FOUR, EVEN, steps=1), None, ("warm-up", None), 24.0, 9.0),
    # divided evenly, the same work is an even 1F1B with F + BW = 3 * 5 / 4
    "a stage twice as long": (run_steps(FOUR, ONE_LONG), None, ("imbalance", 2), 11 * 3.75, None),
    "where the profile expects even stages": (run_steps(FOUR, ONE_LONG), PROFILED, ("straggler", 2), 33.0, None),
    "a device disturbed for some tasks": (
        run_steps(FOUR, EVEN, slower=lambda step, i: 4.0 if step == 2 and i in ON_ONE else 1.0),
        None, ("straggler", 1), 33.0, None,
    ),
    "a slow link": (run_steps(FOUR, SLOW_LINK), None, ("link", "1->2"), 33.0, None),
    "late samples, not a long forward": (
        run_steps(FOUR, EVEN, slower=lambda _, i: 7.0 if i == 0 else 1.0, waits=LATE_SAMPLES),
        None, ("data", 0), 33.0, 6.0,
    ),
    "time between steps": (run_steps(FOUR, EVEN, gap=12.0), None, ("host", 0), 33.0, 12.0),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "planned", "fault", "without", "lost"), STEPS.values(), ids=STEPS)
def test_what_1f1b_loses_to_one_fault(
    steps: tuple[RecordedStep, ...], planned: TaskTimes | None, fault: tuple[str, int | str | None], without: float,
    lost: float | None,
) -> None:  # fmt: skip
    """(D - 1)(F + BW) of (M + D - 1)(F + BW) to its fill and drain, and the rest to the fault."""
    result = explanation(FOUR, steps, planned=planned)
    cause, device = fault
    of = result.of(cause)
    assert (of.device, of.what_if_step_s) == (device, pytest.approx(without))
    expected = {"warm-up": 3 / 11 * (33.0 if cause == "warm-up" else without), cause: result.step_s - without}
    assert seconds(result) == expected
    assert lost is None or seconds(result)[cause] == lost
    assert result.ideal_s == pytest.approx(without if cause == "warm-up" else 8 / 11 * without)
    assert result.causes[0].cause == max(expected, key=expected.__getitem__)
    assert cause != "link" or set(of.links) == {(1, 2), (2, 1)}


def test_a_copy_that_is_slower_than_its_twin_is_a_straggler() -> None:
    schedule = whole_step("1f1b", devices=2, microbatches=4, replicas=2)
    on_three = [i for i, d in enumerate(_devices(schedule)) if d == 3]
    steps = run_steps(schedule, CostTable.even(2), slower=lambda _, i: 2.0 if i in on_three else 1.0)
    result = explanation(schedule, steps)
    assert (result.causes[0].cause, result.causes[0].device) == ("straggler", 3)
    assert result.causes[0].what_if_step_s == pytest.approx(15.0)


def test_a_micro_batch_that_is_longer_on_every_device_is_no_straggler() -> None:
    schedule = whole_step("gpipe", devices=2, microbatches=4)
    tasks = list(schedule.tasks())
    steps = run_steps(schedule, CostTable.even(2), slower=lambda _, i: 2.0 if tasks[i].mbs == (1,) else 1.0)
    result = explanation(schedule, steps)
    assert result.of("straggler") is None
    assert result.ideal_s == pytest.approx(5 * 3.0)


def test_messages_that_queue_before_a_narrow_link() -> None:
    """GPipe's forwards come faster (1) than a link carries their messages (3); its backwards (3) do not."""
    schedule = whole_step("gpipe", devices=2, microbatches=6)
    begins = {
        0: {"F": lambda m: m, "BW": lambda m: 26 + 3 * m, "U": lambda m: 44},
        1: {"F": lambda m: 4 + 3 * m, "BW": lambda m: 20 + 3 * m, "U": lambda m: 38},
    }
    took = {"F": 1, "BW": 3, "U": 0}

    def step(number: int) -> RecordedStep:
        rows = []
        for device, order in enumerate(schedule.orders):
            starts = [44.0 * number + begins[device][t.kind](t.mbs[0] if t.mbs else 0) for t in order]
            rows.append(np.array([(at, at + took[t.kind]) for at, t in zip(starts, order, strict=True)]))
        bare = RecordedStep(number + 1, tuple(rows))
        return replace(bare, waits=StepWaits(message_s=message_waits(schedule, bare)))

    assert [t.mbs[0] for t in schedule.orders[0] if t.kind == "BW"] == list(range(6))
    result = explanation(schedule, tuple(map(step, range(3))), norm="none")
    link = result.of("link")
    assert link is not None
    assert result.causes[0].cause == "link"
    assert link.what_if_step_s == pytest.approx(7 * 1 + 7 * 3), "that of a step whose messages take no time"
    assert result.of("host") is None


def test_gradient_sums_that_nothing_hides() -> None:
    """Lazily placed all-reduces: the last of them begins when all compute is done."""
    schedule = whole_step("1f1b", devices=2, microbatches=4, replicas=2)
    costs = replace(CostTable.even(2), all_reduce=(5.0, 5.0))
    result = explanation(schedule, run_steps(schedule, costs))
    assert seconds(result)["sync"] == result.step_s - 15.0
    assert result.of("sync").what_if_step_s == pytest.approx(15.0)
    assert seconds(result)["warm-up"] == 3.0


def test_recomputation() -> None:
    schedule = add_updates(add_recompute(whole_step("gpipe", devices=4, microbatches=8).with_orders(
        [t for t in order if t.kind != "U"] for order in whole_step("gpipe", devices=4, microbatches=8).orders
    ), "early"))  # fmt: skip
    costs = CostTable.even(4, recompute=1.0)
    result = explanation(schedule, run_steps(schedule, costs))
    assert result.ideal_s == pytest.approx(24.0)
    assert result.of("recompute").what_if_step_s == pytest.approx(33.0)
    assert seconds(result) == {"recompute": result.step_s - 33.0, "warm-up": 9.0}


def test_gathers() -> None:
    """A gather before the first forward and nothing to hide it behind."""
    base = whole_step("1f1b", devices=2, microbatches=4, replicas=2)
    bare = base.with_orders([t for t in order if t.kind not in ("U", "AR")] for order in base.orders)
    schedule = add_updates(shard(bare, 3, gather="step", copies=2))
    costs = replace(CostTable.even(2), gather=(4.0, 4.0))
    result = explanation(schedule, run_steps(schedule, costs))
    assert result.of("gather").what_if_step_s == pytest.approx(15.0)
    assert seconds(result) == {"gather": result.step_s - 15.0, "warm-up": 3.0}


def test_updates_that_wait_for_the_norm() -> None:
    schedule = whole_step("1f1b", devices=4, microbatches=8)
    steps = _with_a_late_norm(schedule, 10.0)
    result = explanation(schedule, steps)
    assert (result.causes[0].cause, seconds(result)["norm"]) == ("norm", 10.0)


def _with_a_late_norm(schedule: Schedule, late: float) -> tuple[RecordedStep, ...]:
    """Every update begins so long after the last gradient of all devices."""
    result, shift = [], 0.0
    for step in run_steps(schedule, EVEN):
        updates = [np.array([t.kind == "U" for t in order]) for order in schedule.orders]
        last = max(float(t[~own, 1].max()) for t, own in zip(step.times, updates, strict=True))
        times = tuple(
            np.where(own[:, None], last + late, t) + shift for t, own in zip(step.times, updates, strict=True)
        )
        result.append(RecordedStep(step.number, times))
        shift += late
    return tuple(result)


def test_without_a_barrier_steps_overlap_and_little_is_lost_to_warm_up() -> None:
    """One device has half the work: it never waits, and neither does the other for it."""
    schedule = from_text(
        "microbatches 2\nplacement 0 1\ndevice 0: 0F0 0F1 0BW0 0BW1 0U\ndevice 1: 1F0 1BW0 1F1 1BW1 1U\n"
    )
    result = explanation(schedule, run_steps(schedule, CostTable.even(2)), norm="none")
    assert result.step_s == pytest.approx(9.0)
    assert result.ideal_s == pytest.approx(6.0)


def test_one_device_loses_nothing() -> None:
    schedule = whole_step("1f1b", devices=1, microbatches=4)
    result = explanation(schedule, run_steps(schedule, CostTable.even(1)))
    assert result.step_s == pytest.approx(result.ideal_s) == pytest.approx(12.0)


def test_two_faults_at_once_share_what_only_both_mended_gain() -> None:
    """Two stages twice as long as planned, of which mending one alone gains little: both are named, by halves."""
    schedule = whole_step("1f1b", devices=4, microbatches=8)
    profile = task_times(schedule, EVEN)
    steps = run_steps(schedule, uneven([2, 1, 1, 2]))
    result = explanation(schedule, steps, planned=profile)
    straggler = result.of("straggler")
    assert straggler is not None
    assert set(straggler.devices) == {0, 3}
    assert result.causes[0].cause == "straggler"


# For any schedule and any times, the causes sum to what is lost, and a replay with nothing mended is the run.

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "chimera", "bfs", "zb-v")


@pytest.mark.slow
@settings(max_examples=60, phases=[Phase.generate])  # shrinking takes minutes, and seeds say nothing
@given(st.data())
def test_causes_sum_to_what_is_lost(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    devices, replicas = data.draw(st.sampled_from([2, 4])), data.draw(st.sampled_from([1, 2]))
    chunks = {"chunks": 2} if name in ("interleaved-1f1b", "bfs") else {}
    schedule = whole_step(name, devices, devices * data.draw(st.integers(1, 2)), replicas, **chunks)
    numbers = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    stages = schedule.stages

    def some() -> tuple[float, ...]:
        return tuple(numbers.uniform(0.5, 2.0, stages))

    costs = replace(
        CostTable.even(stages), forward=some(), input_grad=some(), weight_grad=some(), update=some(),
        all_reduce=tuple(numbers.uniform(0, 3, stages)), comm=tuple(numbers.uniform(0, 1, stages)),
    )  # fmt: skip
    jitter = numbers.uniform(0.8, 1.6, (4, sum(map(len, schedule.orders))))
    norm = data.draw(st.sampled_from(["none", "wait"]))
    steps = run_steps(schedule, costs, steps=data.draw(st.integers(1, 4)), gap=float(numbers.uniform(0, 2)),
                      slower=lambda step, i: float(jitter[step, i]), norm=norm)  # fmt: skip
    late = data.draw(st.sampled_from([None, 0.0, 0.3, 1.0]))  # whatever the devices say
    message_s = [
        () if late is None else message_waits(schedule, s, lambda _: float(numbers.uniform(0, late))) for s in steps
    ]
    data_s = tuple(numbers.uniform(0, 1, schedule.devices))
    recorded = tuple(
        RecordedStep(s.number, s.times, StepWaits(data_s=data_s, message_s=one))
        for s, one in zip(steps, message_s, strict=True)
    )
    of = Measured(schedule=schedule, steps=recorded, norm=norm)
    replay = Replay(of)
    assert replay.step_s() == pytest.approx(replay.measured_s, rel=1e-9)
    result = explain(replay)
    assert sum(c.seconds for c in result.causes) == pytest.approx(
        result.step_s - result.ideal_s, abs=1e-9 * result.step_s
    )
    assert [c.seconds for c in result.causes] == sorted((c.seconds for c in result.causes), reverse=True)
    for cause in result.causes:
        assert sum(cause.devices.values()) == pytest.approx(cause.seconds) or not cause.devices
