"""The bounds hold for every family, and are tight where the papers have closed forms."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import SYNCS
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.step_bound import Lives, least_seconds_in_memory, least_step_seconds
from raypipe.plan.predict.step_time import StepOverheads, step_time
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import recomputed_pairs
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.passes import closed_up, without_frozen
from raypipe.schedule.shape import Concat, Shape
from tests.plan.conftest import form_on


def random_costs(stages: int, rng: random.Random) -> CostTable:
    def draw(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(stages))

    return CostTable(
        forward=draw(0.5, 2), input_grad=draw(0.5, 2), weight_grad=draw(0.2, 2), recompute=draw(0.5, 2),
        all_reduce=draw(0, 5), update=draw(0, 1), comm=rng.choice([0.0, 0.3]),
    )  # fmt: skip


def lives_in(schedule: Schedule, frozen: tuple[int, ...], rng: random.Random) -> tuple[Lives, np.ndarray]:
    """Random sizes of activations, and the most bytes of them that each device of an order holds at once."""
    whole = np.array([0.0 if s in frozen else rng.uniform(0.5, 2) for s in range(schedule.stages)])
    again = whole * rng.uniform(0.0, 1.0)
    remade, last = recomputed_pairs(schedule), [backward.last for backward in schedule.backwards]
    room = []
    for tasks in schedule.orders:
        alive: dict[tuple[int, int], float] = {}
        most = 1e-9
        for kind, s, mbs, _ in tasks:
            for mb in mbs:
                if kind in ("F", "R"):
                    kept = again if kind == "F" and (s, mb) in remade else whole
                    alive[s, mb] = kept[s] * float(schedule.size)
            most = max(most, sum(alive.values()))
            if kind not in ("F", "R"):  # with a split backward, activations shrink at the first of its parts
                for mb in mbs:
                    alive.pop((s, mb), None)
            elif kind in last[s]:
                for mb in mbs:
                    del alive[s, mb]
        room.append(most)
    return Lives(whole, again, np.ones(schedule.stages)), np.array(room)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "dapple"])
def test_no_step_is_faster_than_its_bound(name: str) -> None:
    rng = random.Random(name)
    checked = 0
    for _ in range(25):
        devices, count = rng.choice([2, 4, 6]), rng.randint(1, 14)
        options = SCHEDULES[name].options
        chunks = rng.choice([1, 2, 3]) if "chunks" in options else 1
        pipelines = rng.choice([2, devices]) if "pipelines" in options else 2
        concat: Concat = rng.choice(get_args(Concat)) if "concat" in options else "direct"
        unit = rng.randint(1, count) if "unit" in options else None
        shape = Shape(
            devices=devices, microbatches=count, chunks=chunks, pipelines=pipelines, concat=concat, unit=unit
        )  # fmt: skip
        try:
            schedule = generate(name, shape)
        except ScheduleError:
            continue
        form = form_on(devices, name, chunks=chunks, pipelines=pipelines, concat=concat)
        assert isinstance(form, Form)
        assert form.placement == schedule.placement
        costs = random_costs(schedule.stages, rng)
        copies = rng.choice([1, 3])
        norm = rng.choice(("none", *get_args(RequestedNormPolicy)))
        overheads = StepOverheads(copies=copies, norm=norm, norm_s=0.1 if norm == "wait" else 0.0)
        frozen = tuple(sorted(rng.sample(range(schedule.stages), rng.randint(1, schedule.stages - 1))))
        for some in ((), frozen, tuple(range(schedule.stages // 2))):
            order = Order(closed_up(without_frozen(schedule, some)))
            own = Form.of(order.schedule, form.alias)  # what is frozen may be all that was split
            assert replace(own, recomputes=form.recomputes, joint=form.joint) == form
            assert own.joint >= form.joint
            for sync in SYNCS:
                step = step_time(order, costs, sync, overheads).step
                assert least_step_seconds(form, count, costs, overheads, frozen=some) <= step * (1 + 1e-9)
                lives, room = lives_in(order.schedule, some, rng)
                assert least_seconds_in_memory(form, count, costs, lives, room, False, some) <= step * (1 + 1e-9)
        checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("name", "makespan"),
    [
        ("gpipe", "(N + D - 1) * 3"),
        ("1f1b", "(N + D - 1) * 3"),
        ("chimera-tight", "3 * N + 2 * (D - 2)"),
    ],
)
def test_bounds_that_the_closed_forms_reach(name: str, makespan: str) -> None:
    """F = 1, BW = 2: where a schedule idles only because it has to, the bound is its time (Chimera's tight order aside:
    a middle device's first forward can come after D/2 - 1 others, and so can its gradients' way home)."""
    depth, count = 4, 8
    form = form_on(depth, name)
    assert isinstance(form, Form)
    bound = least_step_seconds(form, count, CostTable.even(depth), StepOverheads(norm="wait"))
    exact = eval(makespan, {"N": count, "D": depth})
    assert bound == exact if name != "chimera-tight" else bound <= exact
