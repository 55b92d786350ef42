"""How far devices run ahead of an update: alone these tasks run to their end, and no device could do one more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.deps import link
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.lowering.asynchronous import parts
from raypipe.schedule.lowering.programs import programs, tasks_ahead
from raypipe.schedule.walk import walk

SYNCHRONOUS = sorted(set(SCHEDULES) - {"pipedream", "pipedream-2bw", "auto"})


def runs_alone(schedule: Schedule, heads: list[int]) -> bool:
    """Whether these tasks need nothing but each other."""
    cut = schedule.with_orders(order[:n] for order, n in zip(schedule.orders, heads, strict=True))
    graph = link(cut)
    return not graph.missing and not walk(graph, [1.0] * len(graph.tasks)).stuck


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SYNCHRONOUS), depth=st.sampled_from([2, 4, 6]), count=st.integers(1, 9),
    chunks=st.sampled_from([1, 2]),
)  # fmt: skip
def test_heads_are_forwards_closed_and_as_long_as_can_be(name: str, depth: int, count: int, chunks: int) -> None:
    try:
        schedule = generate(name, Shape(devices=depth, microbatches=count, chunks=chunks))
    except ScheduleError:
        return
    heads = tasks_ahead(schedule)
    assert all(task.kind == "F" for order, n in zip(schedule.orders, heads, strict=True) for task in order[:n])
    assert runs_alone(schedule, heads)
    for device, order in enumerate(schedule.orders):
        longer = [n + (d == device) for d, n in enumerate(heads)]
        if heads[device] < len(order) and order[heads[device]].kind == "F":
            assert not runs_alone(schedule, longer)


def test_a_forward_behind_another_devices_backward_is_not_ahead() -> None:
    """Device 1 could go on to 1F1, but what it reads comes after 0BW0, which waits for the update to be certain."""
    schedule = from_text("device 0: 0F0 0BW0 0F1 0BW1\ndevice 1: 1F0 1BW0 1F1 1BW1", "here")
    assert tasks_ahead(schedule) == [1, 1]
    late = from_text("device 0: 0F0 0BW0 0F1 0BW1\ndevice 1: 1F0 1F1 1BW0 1BW1", "here")
    assert tasks_ahead(late) == [1, 1]


def test_zb_h2_runs_its_whole_warm_up_ahead() -> None:
    schedule = generate("zb-h2", Shape(devices=4, microbatches=8))
    assert tasks_ahead(schedule) == [7, 5, 3, 1]
    lowered = programs(schedule, ahead=True)
    assert [p.ahead.tasks for p in lowered if p.ahead] == [7, 5, 3, 1]
    # What a device sends ahead may be more than its neighbour's own head uses: the rest is stale if it comes to that.
    assert [p.ahead.arrivals for p in lowered if p.ahead] == [{}, {0: 7}, {1: 5}, {2: 3}]
    assert all(p.ahead is None for p in programs(schedule))


@pytest.mark.parametrize("part", [(True, True), (True, False), (False, False), (False, True)])
def test_two_buffered_weights_put_the_update_off_until_the_newest_are_needed(part: tuple[bool, bool]) -> None:
    schedule = parts(generate("pipedream-2bw", Shape(devices=4, microbatches=8)))[part]
    for order, program in zip(schedule.orders, programs(schedule, ahead=True), strict=True):
        assert program.ahead is not None
        head, rest = order[: program.ahead.tasks], order[program.ahead.tasks :]
        assert not any(needs_newest(t) for t in head)
        assert needs_newest(rest[0])
        assert program.ahead.arrivals == {source: len(m) for source, m in program.arrivals.items()}


def needs_newest(task: Task) -> bool:
    return task.kind == "U" or (task.kind == "F" and task.mbs[0] >= 8)
