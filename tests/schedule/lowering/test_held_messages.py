"""The bound on held messages: against every state that devices can be in, and in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.messages_in_flight import held_messages
from raypipe.schedule.lowering.programs import Message, programs
from tests.schedule.test_properties import schedules

LIMIT = 4000
"""States; what is beyond is left out."""


def sizes_of(schedule: Schedule) -> list[float]:
    return [1.0 + s for s in range(schedule.stages)]


def size(m: Message) -> float:
    """Of ``sizes_of``: a gradient is as large as the output that it belongs to."""
    return 1.0 + (m.src_stage if m.direction == "act" else m.dst_stage)


def check(schedule: Schedule) -> int:
    """Hold the bound against all states that devices can be in, or ``LIMIT`` of them; return how many there were."""
    rows = programs(schedule)
    held = held_messages(schedule, sizes_of(schedule))
    start = (0,) * len(rows)
    seen, todo = {start}, [start]
    while todo and len(seen) <= LIMIT:
        state = todo.pop()
        done = [p.actions[:n] for p, n in zip(rows, state, strict=True)]
        out = {m for actions in done for a in actions for m in a.sends if not m.local}
        used = {m for actions in done for a in actions for m in a.receives}
        for d, n in enumerate(state):
            if n == len(rows[d].actions):
                continue
            action = rows[d].actions[n]
            if all(m.local or m in out for m in action.receives):
                mine = {m for m in action.sends if not m.local}
                others = {m for m in out - used if d in (m.src_device, m.dst_device)} - set(action.receives)
                assert sum(map(size, others | mine)) <= held[d][n] + 1e-9
                after = (*state[:d], n + 1, *state[d + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return len(seen)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schedules())
def test_no_state_holds_more(schedule: Schedule) -> None:
    """At the start and at the end of every task, in every state that can be reached."""
    check(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_state_of_a_named_schedule_holds_more(name: str) -> None:
    chunks = 2 if name == "interleaved-1f1b" else 1
    assert check(generate(name, Shape(devices=2, microbatches=6, chunks=chunks))) > 12


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (6, 12)])
def test_the_first_device_of_1f1b_in_closed_form(devices: int, count: int) -> None:
    """All activations sent so far; beside the last one of the warm-up, the first gradient may have come."""
    schedule = generate("1f1b", Shape(devices=devices, microbatches=count))
    held = held_messages(schedule, [1.0] * schedule.stages)
    assert held[0][:devices] == [*range(1, devices), devices + 1]
