"""The period against many steps timed one after another by a second, naive simulator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.run_ahead import tasks_ahead
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, split_backward
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import gains_ahead, period


def naive_period(schedule: Schedule, costs: CostTable, steps: int = 120, norm: NormPolicy = "none") -> float:
    """Time per step late in a long run: sweep over the tasks until no start moves, step by step."""
    heads, complete = tasks_ahead(schedule), [0.0] * schedule.devices
    lag = max(costs.links)
    graph = link(schedule)
    time = costs.durations(schedule, graph.tasks)
    kinds = [t.kind for t in graph.tasks]
    device_free = [0.0] * schedule.devices
    network_free = [0.0] * schedule.devices
    weights = {(s, r): 0.0 for s in range(schedule.stages) for r in range(schedule.replicas)}
    ends = []
    for _ in range(steps):
        end = [0.0] * len(graph.tasks)
        moved = True
        while moved:
            moved = False
            common: dict[int, float] = {}
            for again in (False, True):  # first when each holder of a stage could all-reduce, then all together
                for d in range(schedule.devices):
                    at, net = device_free[d], network_free[d]
                    for i in range(graph.first[d], graph.first[d + 1]):
                        task = graph.tasks[i]
                        late = costs.comm if kinds[i] != "AR" else 0.0
                        needs = [end[p] + (late if graph.device[p] != d else 0.0) for p in graph.preds[i]]
                        if norm == "wait" and task.kind == "U":
                            needs += [e + lag * (graph.device[p] != d) for p, e in enumerate(end) if kinds[p] != "U"]
                        if norm == "optimistic" and i == graph.first[d] + heads[d]:
                            needs += [c + lag for e, c in enumerate(complete) if e != d]
                        start = max([at, *needs])
                        if task.kind == "AR":
                            start = max(start, net)
                            common[task.stage] = max(common.get(task.stage, 0.0), start)
                            start = common[task.stage] if again else start
                            net = start + time[i]
                        else:
                            if task.kind == "F":
                                start = max(start, weights[task.stage, task.replica])
                            at = start + time[i]
                        if again and abs(end[i] - start - time[i]) > 1e-12:
                            end[i], moved = start + time[i], True
        for i, task in enumerate(graph.tasks):
            d = graph.device[i]
            if task.kind == "AR":
                network_free[d] = max(network_free[d], end[i])
            else:
                device_free[d] = max(device_free[d], end[i])
        for d in range(schedule.devices):
            complete[d] = max(end[i] for i in range(graph.first[d], graph.first[d + 1]) if kinds[i] != "U")
        for stage in range(schedule.stages):
            gradients = [end[i] for i, t in enumerate(graph.tasks) if t.stage == stage and t.kind in ("W", "BW")]
            ready = max(gradients)
            for replica in range(schedule.replicas):
                own = [end[i] for i, t in enumerate(graph.tasks) if t[1:] == (stage, (), replica)]  # AR and U
                weights[stage, replica] = max([ready, *own])
        ends.append(max(device_free))
    half = steps // 2
    return (ends[-1] - ends[half - 1]) / (steps - half)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "chimera"]), depth=st.sampled_from([2, 4]),
    count=st.integers(1, 5), split=st.booleans(), copies=st.integers(1, 2), policy=st.sampled_from(["none", "eager"]),
    data=st.data(),
)  # fmt: skip
def test_period_agrees_with_a_long_run(
    name: str, depth: int, count: int, split: bool, copies: int, policy: str, data: st.DataObject
) -> None:
    shape = Shape(devices=depth, microbatches=count, chunks=2 if name.startswith("inter") else 1)
    stages = stages_of(name, shape)
    draw = lambda: tuple(data.draw(st.integers(1, 5)) for _ in range(stages))  # noqa: E731
    costs = CostTable(
        forward=draw(), input_grad=draw(), weight_grad=draw(), recompute=(0,) * stages, all_reduce=draw(),
        update=draw(), comm=data.draw(st.sampled_from([0, 1])),
    )  # fmt: skip
    schedule = replicate(generate(name, shape, costs), copies)
    schedule = split_backward(schedule) if split else schedule
    if policy == "eager":
        schedule = add_updates(place_gradient_sync(schedule, "eager", costs))
    # A transient may leave a constant behind and the run may alternate between two lengths of step.
    assert period(schedule, costs) == pytest.approx(naive_period(schedule, costs), rel=0.01)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h2", "zb-v", "zeropp", "chimera"]), depth=st.sampled_from([2, 4]),
    count=st.integers(1, 5), copies=st.integers(1, 2), norm=st.sampled_from(["wait", "optimistic"]), data=st.data(),
)  # fmt: skip
def test_period_with_a_global_norm_agrees_with_a_long_run(
    name: str, depth: int, count: int, copies: int, norm: NormPolicy, data: st.DataObject
) -> None:
    shape = Shape(devices=depth, microbatches=count)
    stages = stages_of(name, shape)
    draw = lambda: tuple(data.draw(st.integers(1, 5)) for _ in range(stages))  # noqa: E731
    costs = CostTable(
        forward=draw(), input_grad=draw(), weight_grad=draw(), recompute=(0,) * stages, all_reduce=draw(),
        update=draw(), comm=data.draw(st.sampled_from([0, 1])),
    )  # fmt: skip
    schedule = replicate(generate(name, shape, costs), copies)
    schedule = add_updates(place_gradient_sync(schedule, "lazy", costs))
    assert period(schedule, costs, norm=norm) == pytest.approx(naive_period(schedule, costs, norm=norm), rel=0.01)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream", "pipedream-2bw", "auto"}))
def test_running_ahead_of_the_norm_takes_no_longer_than_needing_none(name: str) -> None:
    """With even costs; waiting for it makes every step as long as its makespan, which is what zero-bubble avoids."""
    base = generate(name, Shape(devices=4, microbatches=8))
    schedule, costs = add_updates(place_gradient_sync(base, "lazy")), CostTable.even(base.stages)
    free, wait, ahead = (period(schedule, costs, norm=norm) for norm in ("none", "wait", "optimistic"))
    assert wait == simulate(schedule, costs).makespan
    assert ahead == free
    gains = name in ("zb-h2", "zb-v", "zeropp", "fast-forward", "modulo")
    assert gains_ahead(schedule, costs) == (free < wait) == gains


def test_a_norm_needs_updates_to_wait_for_it() -> None:
    with pytest.raises(ScheduleError, match="no update"):
        period(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2), norm="wait")


def test_period_lies_between_the_busiest_device_and_the_makespan() -> None:
    for name in ("gpipe", "1f1b", "chimera"):
        schedule = split_backward(generate(name, Shape(devices=4, microbatches=8)))
        timeline = simulate(schedule, CostTable.even(4))
        assert max(timeline.busy) <= period(schedule, CostTable.even(4)) <= timeline.makespan


def test_period_of_1f1b_is_its_makespan() -> None:
    """Its first device cannot begin the next step before its last backward, which is the end of the step."""
    assert period(generate("1f1b", Shape(devices=4, microbatches=4)), CostTable.even(4)) == 21


def test_free_tasks_have_no_period() -> None:
    assert period(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2, 0, 0, 0)) == 0
