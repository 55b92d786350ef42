"""A job's schedule, and the memory that it may fill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.job import requested_schedule as order
from raypipe.job.requested_schedule import base_schedule, checked_schedule
from raypipe.job.spec import job_from
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import SCHEDULES
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.shape import Shape


def job_with(**parallel: Any):
    return job_from(
        {
            "name": "limited",
            "model": {"type": "gpt", "layers": 6, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256},
            "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": 16},
            "parallel": {"schedule": "1f1b", "stages": 4, "microbatch": 2, **parallel},
        }
    )  # fmt: skip


def test_what_is_recomputed_does_not_count_until_then() -> None:
    """1F1B on four devices holds four activations; recomputed, one at a time."""
    with pytest.raises(SpecError, match="holds 2 activations, the limit is 1"):
        job_with(memory_limit=1)
    job = job_with(memory_limit=1, recompute="full")
    cut = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert peak_activations(build_schedule(Plan.of(job.parallel, cut, 16), 16)) == (1, 1, 1, 1)
    with pytest.raises(SpecError, match=r"the limit is 0\.5"):
        job_with(memory_limit=0.5, recompute="full")
    with pytest.raises(SpecError, match="holds 2 activations, the limit is 1"):
        job_with(memory_limit=1, recompute="full", keep=[1.0, 1.0, 1.0, 1.0])
    # Of single layers, a stage keeps the others from the forward on.
    with pytest.raises(SpecError, match="holds 2 activations, the limit is 1"):
        job_with(memory_limit=1, recompute=[0])


def test_a_family_that_orders_by_the_limit_still_does() -> None:
    parallel = job_with(schedule="zb-h1", memory_limit=2).parallel
    plan = Plan.of(parallel, ((0, 1), (2, 3), (4, 5), (6, 7)), 16)
    assert max(peak_activations(build_schedule(plan, 16))) == 2


def long_job(batch: int, **parallel: Any):
    return job_from(
        {
            "name": "long",
            "model": {"type": "gpt", "layers": 8, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256,
                      "tie_embeddings": False},
            "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": batch},
            "parallel": {"stages": 4, "microbatch": 1, **parallel},
        }
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("dapple",)])
def test_a_step_of_a_million_micro_batches_is_not_made_to_be_looked_at(schedule: str) -> None:
    """Made whole, it would take a minute and gigabytes."""
    job = long_job(1_000_004, schedule=schedule)
    with no_more_tasks_than(200_000):
        schedule_seen = checked_schedule(job.parallel, job.train.batch)
    small = base_schedule(job.parallel, 24)
    for what in ("placement", "versions", "size", "rules", "graph"):
        assert getattr(schedule_seen, what) == getattr(small, what)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "needs"), [("gpipe", 100_004), ("1f1b", 4), ("chimera", 4)])
def test_the_activations_of_a_long_step_are_held_against_the_limit(schedule: str, needs: int) -> None:
    long_job(100_004, schedule=schedule, memory_limit=needs)
    with pytest.raises(SpecError, match=f"holds {needs:g} activations, the limit is {needs - 1:g}"):
        long_job(100_004, schedule=schedule, memory_limit=needs - 1)


@contextmanager
def no_more_tasks_than(most: int) -> Iterator[None]:
    """Fail where a schedule of more tasks is made."""
    made = order.generate

    def counted(name: str, shape: Shape) -> Schedule:
        schedule = made(name, shape)
        assert sum(map(len, schedule.orders)) <= most
        return schedule

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "generate", counted)
        yield
