"""Sharded data parallelism on GPUs: no order of transfers, gathers and reduce-scatters deadlocks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.ir import Schedule, Sharding
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Program, programs, step_programs
from raypipe.schedule.lowering.safe_order import gpu_programs, safe_order
from raypipe.schedule.passes import add_updates, forwards_alone, place_gradient_sync, replicate, shard
from raypipe.schedule.passes.shard import Gather
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.sharding import shard_members
from raypipe.schedule.verify import verify
from tests.exhaustive import exhaustive
from tests.schedule.lowering.queues import Op, finishes, operations

SYNCHRONOUS = [name for name in SCHEDULES if not name.startswith("pipedream")]
SOME = ("1f1b", "interleaved-1f1b", "zb-v", "chimera", "zeropp")
QUEUES = (1, 3, 99)


def sharded(
    schedule: Schedule, level: int, gather: Gather, copies: int = 2, group: int | None = None, sync: Sync = "lazy",
    ahead: int = 1,
) -> Schedule:  # fmt: skip
    result = replicate(shard(schedule, level, gather=gather, unit=2, group=group, ahead=ahead), copies)
    result = add_updates(place_gradient_sync(result, sync))
    verify(result)
    return result


def forwards(schedule: Schedule) -> list[Program]:
    return programs(forwards_alone(schedule))


def proven(schedule: Schedule, ahead: bool = False) -> Iterator[list[list[Op]]]:
    """What devices issue in two training steps and in a validation, as the runtime orders them."""
    members, count = shard_members(schedule.sharding, schedule.placement), schedule.microbatches
    train, evaluate = gpu_programs(
        step_programs(schedule, ahead), forwards(schedule), count, schedule.versions, members
    )
    yield operations([train[WHOLE]] * 2, count, shards=members)
    yield operations([evaluate], count, shards=members)


def shapes(name: str) -> Iterator[Schedule]:
    for devices, count in ((2, 4), (4, 8)):
        for chunks in (2, 1):
            try:
                yield generate(name, Shape(devices=devices, microbatches=count, chunks=chunks))
            except ScheduleError:
                continue
            break


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *exhaustive(*(name for name in SYNCHRONOUS if name not in SOME))])
def test_named_schedules_cannot_deadlock(name: str) -> None:
    checked = 0
    kinds = ((2, None, "eager"), (4, 2, "lazy"))  # HSDP with the smaller shape, which has twice the copies
    for schedule, (copies, group, sync) in zip(shapes(name), reversed(kinds), strict=False):
        for level, gather in itertools.product((1, 2, 3), get_args(Gather)):
            for devices in proven(sharded(schedule, level, gather, copies, group, sync)):
                checked += 1
                assert all(finishes(devices, queues) for queues in QUEUES)
    assert checked


def test_every_collective_has_all_its_members() -> None:
    """HSDP over four copies in groups of two: gathers and scatters in pairs, and each shard is summed over two."""
    schedule = sharded(generate("1f1b", Shape(devices=2, microbatches=2)), 3, "step", 4, 2)
    members = shard_members(schedule.sharding, schedule.placement)
    assert members[0, 0] == (0, (0, 2), (0, 4))
    assert members[1, 3] == (7, (5, 7), (3, 7))
    train, validation = proven(schedule)
    for devices in (train, validation):
        ends = Counter(op.meets for ops in devices for op in ops if op.stream.startswith("group"))
        assert set(ends.values()) <= {2, len(devices) // 2}, "pairs; sums of a stage over its four copies"
    sums = {op.meets for ops in train for op in ops if op.stream.startswith("others")}
    assert {(s, held) for _, s, held in sums} == {(0, (0, 4)), (0, (2, 6)), (1, (1, 5)), (1, (3, 7))}
    names = [op.name for op in train[0]]
    assert names.index("0AG") < names.index("0F0") < names.index("0RS") < names.index("norm")
    forward = [op.name for op in validation[0]]
    assert forward.index("0AG") < forward.index("0F0")
    assert forward.count("0AG") == 1


def test_a_gather_that_one_copy_issues_later_is_found() -> None:
    """Two stages on a device: copies that gather them in different orders wait for each other on one queue."""
    schedule = sharded(generate("interleaved-1f1b", Shape(devices=2, microbatches=4, chunks=2)), 3, "step", ahead=8)
    members, count = shard_members(schedule.sharding, schedule.placement), schedule.microbatches
    rows = safe_order([step_programs(schedule)[WHOLE]], count, False, members)[0]
    assert finishes(operations([rows], count, shards=members), 1)
    first = [i for i, a in enumerate(rows[0].actions) if a.task.kind == "AG"]
    order = list(rows[0].actions)
    i, j = first[:2]
    order[i], order[j] = order[j], order[i]
    planted = [Program(0, tuple(order), rows[0].arrivals, frozenset(), frozenset()), *rows[1:]]
    assert not finishes(operations([planted], count, shards=members), 1)
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        gpu_programs({WHOLE: planted}, forwards(schedule), count, "flush", members)


def test_runs_ahead_of_the_norm() -> None:
    for devices in proven(sharded(generate("zb-h1", Shape(devices=3, microbatches=6)), 3, "unit"), ahead=True):
        assert finishes(devices, 1)


@pytest.mark.parametrize(("copies", "group", "experts"), [(8, None, 2), (8, 4, 2), (12, 6, 4), (4, 2, 2)])
def test_copies_with_the_same_experts_divide_these_once_more(copies: int, group: int | None, experts: int) -> None:
    """Each device of a shard group is in one group of its share; who holds the same shard has the same share."""
    sharding, placement = Sharding(levels=(3,), copies=copies, group=group), tuple((d,) for d in range(copies))
    shares = [copy % experts for copy in range(copies)]
    members, size = shard_members(sharding, placement, shares), group or copies
    if size % experts or size == experts:
        assert not members
        return
    for (_, copy), member in members.items():
        first = copy // size * size
        assert member.group == tuple(c for c in range(first, first + size) if shares[c] == shares[copy])
        assert member.others == tuple(c for c in range(copies) if c % size == copy % size)
