"""The bound on messages in flight: against every state that devices can be in together, and in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.programs import Message, Program, programs
from raypipe.schedule.lowering.safe_order import safe_order
from tests.schedule.lowering.exact_bound import InFlight, messages_in_flight
from tests.schedule.test_properties import schedules

LIMIT = 4000
"""States; larger cases are left out."""


def every_state(rows: list[Program]) -> list[tuple[float, float]] | None:
    """(sent, arriving) per device: the most over all states that can be reached, found by visiting them all."""
    most = [[0.0, 0.0] for _ in rows]
    start = (0,) * len(rows)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        done = [p.actions[:n] for p, n in zip(rows, state, strict=True)]
        out = {m for actions in done for a in actions for m in a.sends if not m.local}
        used = {m for actions in done for a in actions for m in a.receives}
        for m in out - used:
            assert m.src_device != m.dst_device
        for d in range(len(rows)):
            most[d][0] = max(most[d][0], size_of(m for m in out - used if m.src_device == d))
            most[d][1] = max(most[d][1], size_of(m for m in out - used if m.dst_device == d))
        for d, n in enumerate(state):
            if n < len(rows[d].actions) and all(m.local or m in out for m in rows[d].actions[n].receives):
                after = (*state[:d], n + 1, *state[d + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        if len(seen) > LIMIT:
            return None
    return [(a, b) for a, b in most]


def size(m: Message) -> float:
    return 1.0 + m.src_stage + 10 * (m.direction == "grad")


def size_of(messages: object) -> float:
    return sum(map(size, messages))  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schedules())
def test_no_state_holds_more_and_one_holds_as_much(schedule: Schedule) -> None:
    rows = programs(schedule)
    expected = every_state(rows)
    if expected is not None:
        assert [(f.sent, f.arriving) for f in messages_in_flight(rows, size)] == expected


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (4, 2), (6, 12)])
def test_1f1b_and_gpipe_in_closed_form(devices: int, count: int) -> None:
    """A stage of 1F1B sends as many activations as it keeps in flight; GPipe all of them."""
    found = messages_in_flight(programs(generate("1f1b", Shape(devices=devices, microbatches=count))))
    assert found[0].sent == min(devices, count)
    assert found[-1].arriving == min(2, count)
    assert messages_in_flight(programs(generate("gpipe", Shape(devices=devices, microbatches=count))))[0].sent == count


def test_a_gpu_receives_no_more_ahead_than_its_program_says() -> None:
    schedule = generate("1f1b", Shape(devices=4, microbatches=16))
    rows = programs(schedule)
    assert [f.issued for f in messages_in_flight(rows)] == [1, 1, 1, 1]
    ordered = safe_order([rows], 16)[0]
    assert [f.issued for f in messages_in_flight(ordered)] == [1, 2, 2, 1]
    assert all(isinstance(f, InFlight) and f.issued <= f.arriving for f in messages_in_flight(ordered))
