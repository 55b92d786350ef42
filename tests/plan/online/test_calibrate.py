"""Fitting costs to a timeline undoes simulating it."""

from __future__ import annotations

import random

import pytest

from raypipe.plan.online.calibrate import fit_costs, message_delays
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Span, Timeline


def uneven(stages: int, comm: float | tuple[float, ...], all_reduce: float = 0.0, recompute: float = 0.0) -> CostTable:
    """Another number for every stage and kind."""
    values = iter(range(1, 100))

    def some(scale: float) -> tuple[float, ...]:
        return tuple(scale * (1 + next(values) / 7) for _ in range(stages))

    return CostTable(
        forward=some(1.0), input_grad=some(1.1), weight_grad=some(0.9), recompute=some(recompute),
        all_reduce=some(all_reduce), update=some(0.3), comm=comm,
    )  # fmt: skip


def step(name: str, devices: int, copies: int = 1, **options: int) -> Schedule:
    """A whole training step, as plans have it."""
    schedule = replicate(generate(name, Shape(devices=devices, microbatches=2 * devices, **options)), copies)
    return add_updates(place_gradient_sync(schedule, "lazy"))


CASES = [
    ("1f1b", 4, 1, {}, 0.2),
    ("gpipe", 3, 1, {}, 0.0),
    ("interleaved-1f1b", 2, 1, {"chunks": 2}, 0.05),
    ("zb-h1", 4, 1, {}, 0.1),
    ("1f1b", 4, 1, {}, (0.3, 0.05, 0.6)),
    ("interleaved-1f1b", 2, 1, {"chunks": 2}, (0.1, 0.5, 0.2)),
    ("1f1b", 2, 2, {}, 0.1),
    ("chimera", 4, 1, {}, 0.1),
    ("chimera", 4, 1, {}, (0.2, 0.0, 0.4)),
    ("model-parallel", 3, 1, {}, 0.1),
]


@pytest.mark.parametrize(("name", "devices", "copies", "options", "comm"), CASES)
def test_costs_come_back(name, devices, copies, options, comm) -> None:
    schedule = step(name, devices, copies, **options)
    shared = schedule.replicas > 1
    costs = uneven(schedule.stages, comm, all_reduce=0.4 if shared else 0.0)
    result = fit_costs([simulate(schedule, costs)])
    for kind in ("F", "U", *(("AR",) if shared else ())):
        assert result.by_kind(kind) == pytest.approx(costs.by_kind(kind), rel=1e-9), kind
    backwards = [task for task in schedule.tasks() if task.kind == "BW"]
    assert result.durations(schedule, backwards) == pytest.approx(costs.durations(schedule, backwards), rel=1e-9)
    if any(task.kind == "W" for task in schedule.tasks()):
        assert result.input_grad == pytest.approx(costs.input_grad, rel=1e-9)
        assert result.weight_grad == pytest.approx(costs.weight_grad, rel=1e-9)
    assert result.links[:-1] == pytest.approx(costs.links[:-1], abs=1e-9)


@pytest.mark.parametrize(("name", "devices", "copies", "options", "comm"), CASES)
def test_the_prediction_is_the_step_that_was_measured(name, devices, copies, options, comm) -> None:
    schedule = step(name, devices, copies, **options)
    costs = uneven(schedule.stages, comm, all_reduce=0.4 if schedule.replicas > 1 else 0.0)
    measured = simulate(schedule, costs)
    assert simulate(schedule, fit_costs([measured])).makespan == pytest.approx(measured.makespan, rel=1e-9)


def test_a_recompute_that_began_before_the_gradient_came_says_nothing_of_the_link() -> None:
    """Chimera's doubling has R wait for the gradient; a device begins at once and has no use for it yet."""
    schedule = generate("chimera", Shape(devices=4, microbatches=8, concat="doubling"))
    simulated = simulate(schedule, uneven(4, 0.1, recompute=0.5))
    spans = [
        [Span(task, start - 0.4 if task.kind == "R" else start, end) for task, start, end in own]
        for own in simulated.spans
    ]
    early = Timeline(schedule, tuple(map(tuple, spans)))
    assert min(delay.seconds for delay in message_delays(early)) >= 0.1 - 1e-9
    assert fit_costs([early]).links[:-1] == pytest.approx((0.1,) * 3)


@pytest.mark.parametrize(("name", "copies", "options"), [("interleaved-1f1b", 2, {"chunks": 2}), ("chimera", 1, {})])
def test_sums_issued_together_do_not_count_twice(name, copies, options) -> None:
    """A device notes when it issued a sum; it may have had others under way by then."""
    schedule = step(name, 4, copies, **options)
    costs = uneven(schedule.stages, 0.1, all_reduce=0.8)
    simulated = simulate(schedule, costs)
    noted = []
    for spans in simulated.spans:
        free, row = 0.0, []
        for task, start, end in spans:
            row.append(Span(task, free if task.kind == "AR" else start, end))
            free = free if task.kind == "AR" else end
        noted.append(tuple(row))
    assert any(a != b for a, b in zip(noted, simulated.spans, strict=True))
    result = fit_costs([Timeline(schedule, tuple(noted))])
    assert result.all_reduce == pytest.approx(costs.all_reduce, rel=1e-9)


def test_recomputation_has_a_time_of_its_own() -> None:
    schedule = add_updates(generate("early-recompute", Shape(devices=3, microbatches=4)))
    costs = uneven(3, 0.0, recompute=0.8)
    result = fit_costs([simulate(schedule, costs)])
    used = {task.stage for task in schedule.tasks() if task.kind == "R"}
    assert used
    for stage in used:
        assert result.recompute[stage] == pytest.approx(costs.recompute[stage])


def test_a_paired_forward_counts_as_two() -> None:
    schedule = add_updates(generate("chimera", Shape(devices=2, microbatches=8, concat="doubling")))
    assert any(len(task.mbs) == 2 for task in schedule.tasks())
    costs = uneven(2, 0.0)
    assert fit_costs([simulate(schedule, costs)]).forward == pytest.approx(costs.forward)


def test_a_few_slow_steps_move_no_cost() -> None:
    """Medians: another process on the machine disturbs some steps, not the prediction."""
    schedule = step("1f1b", 2)
    costs = uneven(2, 0.1)
    steps = [simulate(schedule, costs) for _ in range(5)]
    chance = random.Random(0)
    for i in (1, 3):
        steps[i] = Timeline(
            schedule,
            tuple(tuple(Span(t, 3 * a, 3 * b + chance.random()) for t, a, b in spans) for spans in steps[i].spans),
        )
    result = fit_costs(steps)
    for kind in ("F", "BW", "U"):
        assert result.by_kind(kind) == pytest.approx(costs.by_kind(kind), rel=1e-9)
    assert result.links == pytest.approx((0.1, 0.1), rel=1e-9)


def test_only_messages_that_were_waited_for_count() -> None:
    schedule = step("1f1b", 2)
    result = message_delays(simulate(schedule, CostTable.even(2, comm=0.25)))
    assert {delay.stages for delay in result} == {(0, 1)}
    assert len(result) == 2 * schedule.microbatches
    delays = [delay.seconds for delay in result if delay.waited]
    assert min(delay.seconds for delay in result) == 0.25
    assert delays
    assert delays == pytest.approx([0.25] * len(delays))
    # One device sends itself nothing.
    assert message_delays(simulate(step("1f1b", 1), CostTable.even(1))) == []


def test_a_step_retimed_with_its_own_task_times_loses_only_its_idle_waits() -> None:
    from raypipe.plan.online.measured_steps import retimed

    schedule = generate("1f1b", Shape(devices=3, microbatches=5))
    costs = CostTable.even(3, 2.0, 3.0, 4.0, comm=0.5)
    timeline = simulate(schedule, costs)
    assert retimed(timeline, costs) == pytest.approx(timeline.makespan)
    late = Timeline(
        schedule, tuple(tuple(s._replace(start=s.start + 7, end=s.end + 7) for s in d) for d in timeline.spans)
    )
    assert retimed(late, costs) == pytest.approx(timeline.makespan)  # it begins at 0, whenever the step began
    # One task twice as long on the critical path makes the step longer by as much.
    first = timeline.spans[0][0]
    spans = ((first._replace(end=first.end + 2.0), *timeline.spans[0][1:]), *timeline.spans[1:])
    assert retimed(Timeline(schedule, spans), costs) == pytest.approx(timeline.makespan + 2.0)
