"""Every named schedule, on any shape and costs: a valid step or one clear error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.passes import add_updates, fuse_backward, place_gradient_sync, replicate, split_backward
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period

NAMES = [
    "gpipe", "1f1b", "dapple", "interleaved-1f1b", "bfs", "chimera", "chimera-tight", "gems", "pipedream",
    "pipedream-2bw", "zb-h1", "zb-h2", "zb-v", "zeropp", "early-recompute", "shifted-critical-path", "model-parallel",
    "fast-forward", "modulo",
]  # fmt: skip


def test_the_names_of_the_contract() -> None:
    assert set(NAMES) <= set(SCHEDULES)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    found: dict[str, object] = {"devices": draw(st.integers(1, 6)), "microbatches": draw(st.integers(1, 14))}
    for key, values in {
        "chunks": st.integers(1, 3), "unit": st.integers(1, 15), "pipelines": st.sampled_from([2, 3, 4, 6]),
        "concat": st.sampled_from(["direct", "doubling", "halving"]), "memory_limit": st.integers(0, 12),
    }.items():  # fmt: skip
        if draw(st.integers(0, 3)) == 0:
            found[key] = draw(values)
    return found


@settings(max_examples=250, deadline=None)
@given(name=st.sampled_from(NAMES), shape=shapes(), data=st.data())
def test_valid_or_refused(name: str, shape: dict[str, object], data: st.DataObject) -> None:
    try:
        made = Shape(**shape)  # type: ignore[arg-type]
        n = stages_of(name, made)
        pick = st.sampled_from([0.0, 0.5, 1.0, 3.0])
        lists = [tuple(data.draw(pick) for _ in range(n)) for _ in range(4)]
        zero = (0.0,) * n
        costs = CostTable(
            forward=lists[0], input_grad=lists[1], weight_grad=lists[2], recompute=lists[3], all_reduce=zero,
            update=zero, comm=data.draw(st.sampled_from([0.0, 0.25])),
        )  # fmt: skip
        schedule = generate(name, made, costs)
    except ScheduleError as error:
        if not (error.where and error.why and error.fix):
            pytest.fail(f"no clear message: {error.args}")
        return
    verify(schedule, memory_limit=made.memory_limit)
    assert schedule.name == name
    assert schedule.stages == n
    timeline = simulate(schedule, costs)
    close = 1 + 1e-9
    assert lower_bound(schedule, costs) <= timeline.makespan * close
    assert max(timeline.busy) <= period(schedule, costs) * close
    if schedule.versions == "flush":
        assert period(schedule, costs) <= timeline.makespan * close
    for step in (split_backward(schedule), fuse_backward(schedule, everywhere=True)):
        verify(step)
    verify(add_updates(place_gradient_sync(replicate(schedule, 2), "eager-opt", costs)))


@pytest.mark.parametrize("name", NAMES)
def test_costs_of_the_wrong_length_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="give 1 or"):
        generate(name, Shape(devices=4, microbatches=4), CostTable.even(5))


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match="F of stage 0 is -1"):
        CostTable.even(4, forward=-1)
