"""Programs that leave a micro-batch out, or work on one twice, are refused before the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import Program, check_counted, programs, step_programs
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate

Lowered = tuple[dict[Part, list[Program]], list[Program]]


def lowered(schedule: Schedule) -> Lowered:
    forwards = schedule.with_orders([t for t in order if t.kind == "F"] for order in schedule.orders)
    return step_programs(schedule), programs(forwards)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_family_works_on_each_micro_batch_once(name: str, copies: int) -> None:
    if name == "pipedream" and copies > 1:
        pytest.skip("replicas would drift apart")
    chunks = 2 if name in ("interleaved-1f1b", "bfs", "zeropp", "modulo") else 1
    schedule = replicate(generate(name, Shape(devices=4, microbatches=8, chunks=chunks)), copies)
    schedule = add_updates(place_gradient_sync(schedule, "lazy"))
    check_counted(*lowered(schedule), schedule)


def without(program: Program, kind: str) -> Program:
    at = next(i for i, a in enumerate(program.actions) if a.task.kind == kind)
    return replace(program, actions=program.actions[:at] + program.actions[at + 1 :])


def doubled(program: Program, kind: str) -> Program:
    at = next(i for i, a in enumerate(program.actions) if a.task.kind == kind)
    return replace(program, actions=(*program.actions, program.actions[at]))


@pytest.mark.parametrize(("change", "times"), [(without, "0 times"), (doubled, "2 times")])
@pytest.mark.parametrize(("name", "kind"), [("1f1b", "F"), ("1f1b", "BW"), ("zb-h1", "W"), ("pipedream-2bw", "F")])
def test_a_micro_batch_left_out_or_doubled_is_named(name: str, kind: str, change: Any, times: str) -> None:
    schedule = add_updates(generate(name, Shape(devices=2, microbatches=4)))
    train, evaluate = lowered(schedule)
    for part in train:
        changed = {**train, part: [train[part][0], change(train[part][1], kind)]}
        with pytest.raises(ScheduleError, match=f"on stage 1 runs {times} instead of once"):
            check_counted(changed, evaluate, schedule)
    if kind == "F":
        with pytest.raises(ScheduleError, match="in validation"):
            check_counted(train, [evaluate[0], change(evaluate[1], kind)], schedule)
