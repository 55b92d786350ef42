"""No order of transfers on GPUs deadlocks: every named schedule, searched ones, sums of gradients, tensor groups."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Sharding, Task
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Message, Program, completed_by, programs, step_programs
from raypipe.schedule.lowering.safe_order import DRAINS, FILLS, RUNS, check_order, gpu_programs, issued, safe_order
from raypipe.schedule.passes import add_recompute, add_updates, forwards_alone, place_gradient_sync, replicate, shard
from raypipe.schedule.passes.shard import Gather
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.sharding import shard_members
from raypipe.schedule.verify import verify
from raypipe.search import search
from tests.exhaustive import exhaustive
from tests.schedule.lowering.queues import HOST, Op, finishes, operations, streams
from tests.schedule.test_properties import schedules

QUEUES = (1, 3, 99)
"""One, few, and as many as there are streams."""
SYNCS: tuple[Sync, ...] = get_args(Sync)


def whole(schedule: Schedule, sync: str = "lazy", copies: int = 1) -> Schedule:
    return add_updates(place_gradient_sync(replicate(schedule, copies), sync))  # type: ignore[arg-type]


def forwards(schedule: Schedule) -> list[Program]:
    return programs(schedule.with_orders([t for t in order if t.kind == "F"] for order in schedule.orders))


def check(schedule: Schedule, ahead: bool = False) -> int:
    """Run a schedule's programs on hardware queues; return how many things had to move."""
    train, evaluate = gpu_programs(
        step_programs(schedule, ahead), forwards(schedule), schedule.microbatches, schedule.versions
    )
    runs = [[train[WHOLE]], [evaluate]]
    if RUNS in train:
        runs.append([train[FILLS], train[RUNS], train[DRAINS]])
    for steps in runs:
        devices = operations(steps, schedule.microbatches, schedule.versions == "stash")
        assert all(finishes(devices, queues) for queues in QUEUES)
    for program in (p for rows in train.values() for p in rows):
        unchanged(program)
    return sum(len(a.inserted) for row in train.values() for p in row for a in p.actions)


def unchanged(program: Program) -> None:
    """Every receive, task and send is still issued, once, receives before their task and each channel's in order."""
    seen: list[object] = []
    asked: set[Message] = set()
    for action in program.actions:
        for _, what in issued(action):
            asked_again = isinstance(what, Message) and what in action.receives and what in seen
            if not asked_again and not (isinstance(what, Task) and what.kind == "U"):
                seen.append(what)
        assert all(m in seen for m in action.receives)
        asked.update(action.receives)
    assert len(seen) == len(set(seen))
    wanted = {x for a in program.actions for x in (*a.receives, a.task, *a.sends)}
    early = {x for x in seen if isinstance(x, Message)} - asked
    assert set(seen) == {x for x in wanted if not (isinstance(x, Task) and x.kind == "U")} | early


def named() -> Iterator[tuple[str, Schedule]]:
    for name in SCHEDULES:
        for devices, count, chunks in ((2, 4, 2), (4, 8, 2), (4, 6, 3), (3, 5, 1)):
            try:
                yield name, generate(name, Shape(devices=devices, microbatches=count, chunks=chunks))
            except ScheduleError:
                try:
                    yield name, generate(name, Shape(devices=devices, microbatches=count))
                except ScheduleError:
                    continue


NAMED = list(named())


def test_every_name_is_here() -> None:
    assert {name for name, _ in NAMED} == set(SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedules_cannot_deadlock(name: str) -> None:
    for schedule in (s for n, s in NAMED if n == name):
        for sync in SYNCS if schedule.versions == "flush" else ("lazy",):
            for copies in (1, 2) if schedule.versions != "stash" else (1,):
                check(whole(schedule, sync, copies))
        if schedule.versions != "stash":
            check(whole(schedule, "lazy"), ahead=True)


def test_recomputation_with_eager_sums() -> None:
    schedule = add_recompute(generate("chimera", Shape(devices=4, microbatches=8)), "early")
    assert check(whole(schedule, "eager", 2)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *exhaustive(1, 2, 3)])
def test_searched_orders_cannot_deadlock(part: int) -> None:
    """200 random shapes, with the order that a very short search finds."""
    rng = random.Random(part)
    for number in range(50):
        devices, chunks = rng.randint(2, 5), rng.choice([1, 1, 2, 3])
        ring = tuple(s % devices for s in range(devices * chunks))
        vee = tuple(min(s % (2 * devices), 2 * devices - 1 - s % (2 * devices)) for s in range(devices * chunks))
        line = rng.choice([ring, vee])
        placement = rng.choice([(line,), (line, tuple(devices - 1 - d for d in line))])
        costs = CostTable(
            forward=tuple(rng.uniform(0.5, 2) for _ in line), input_grad=tuple(rng.uniform(0.5, 2) for _ in line),
            weight_grad=tuple(rng.uniform(0.5, 2) for _ in line), comm=rng.choice([0.0, 0.3]),
        )  # fmt: skip
        count = rng.randint(len(placement), 8)
        result = search(placement, count, costs, split=rng.random() < 0.5, budget_s=0.002, seed=number)
        schedule = whole(result.schedule, rng.choice(SYNCS), rng.choice([1, 2]))
        check(schedule, ahead=rng.random() < 0.5)


def as_lowered(schedule: Schedule) -> list[Program]:
    return step_programs(schedule)[WHOLE]


def dead(rows: Sequence[Program], schedule: Schedule, queues: int) -> bool:
    return not finishes(operations([rows], schedule.microbatches), queues)


def test_lowered_programs_deadlock_with_one_queue_and_not_with_one_per_stream() -> None:
    """Why programs for GPUs need an order of their own; envelopes alone do with a queue for each stream."""
    schedule = whole(generate("1f1b", Shape(devices=4, microbatches=8)))
    rows = as_lowered(schedule)
    most = max(map(streams, operations([rows], 8)))
    assert most == 5, "compute, and both directions of two channels"
    assert [dead(rows, schedule, queues) for queues in (1, 2, most, 32)] == [True, True, False, False]
    with pytest.raises(ScheduleError, match=r"device 0 in the send of activation 0>1 of micro-batch \d, device 1 in"):
        check_order([rows], 8)
    ordered = safe_order([rows], 8)[0]
    check_order([ordered], 8)
    assert not dead(ordered, schedule, 1)


def test_swapped_sends_are_found_with_any_number_of_queues() -> None:
    schedule = whole(generate("gpipe", Shape(devices=2, microbatches=4)))
    rows = safe_order([as_lowered(schedule)], 4)[0]
    assert not dead(rows, schedule, 1)
    first = list(rows[0].actions)
    first[0], first[1] = (a._replace(sends=b.sends) for a, b in ((first[0], first[1]), (first[1], first[0])))
    planted = Program(0, tuple(first), rows[0].arrivals, frozenset(), frozenset())
    for queues in QUEUES:
        assert dead([planted, rows[1]], schedule, queues)
    with pytest.raises(ScheduleError, match="devices can wait for each other for ever"):
        gpu_programs({WHOLE: [planted, rows[1]]}, forwards(schedule), 4, "flush")


def test_only_what_would_deadlock_moves() -> None:
    """1F1B: of two neighbours that send to each other, one receives first, just before its own send."""
    schedule = whole(generate("1f1b", Shape(devices=2, microbatches=3)))
    rows = safe_order([as_lowered(schedule)], 3)[0]
    moved = [
        (p.device, str(a.task), [str(i.what.mb) for i in a.inserted]) for p in rows for a in p.actions if a.inserted
    ]
    assert len(moved) == 2
    gpipe = as_lowered(whole(generate("gpipe", Shape(devices=4, microbatches=8))))
    assert [p.actions for p in safe_order([gpipe], 8)[0]] == [p.actions for p in gpipe]


def test_sums_begin_early_only_where_that_keeps_the_order() -> None:
    """On GPUs, the buckets of a sum may begin in the task before it unless messages are issued in between."""
    schedule = whole(generate("1f1b", Shape(devices=2, microbatches=4)), "eager", 2)
    plain = as_lowered(schedule)
    ordered = safe_order([plain], schedule.microbatches)[0]
    for device, (one, other) in enumerate(zip(plain, ordered, strict=True)):
        assert len(completed_by(one)) == 1
        first_stage = device in {row[0] for row in schedule.placement}
        assert completed_by(other) == (completed_by(one) if first_stage else frozenset())


def test_heads_receive_nothing_from_beyond_heads() -> None:
    """While an update is pending, a device may wait only for what other devices send in their heads."""
    for name, schedule in NAMED:
        if schedule.versions == "stash":
            continue
        ready = whole(schedule)
        train, _ = gpu_programs(step_programs(ready, True), forwards(ready), ready.microbatches, ready.versions)
        for program in (p for rows in train.values() for p in rows):
            assert program.ahead is not None
            known = {m for source, n in program.ahead.arrivals.items() for m in program.arrivals.get(source, ())[:n]}
            for action in program.actions[: program.ahead.tasks]:
                early = [i.what for i in action.inserted if isinstance(i.what, Message)]
                assert all(m in known or m not in sum(program.arrivals.values(), ()) for m in early), name


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(schedules(), st.sampled_from(SYNCS))
def test_random_orders_cannot_deadlock(schedule: Schedule, sync: Sync) -> None:
    """Any DAG of stages on any placement, in any order that respects dependencies: also what nobody would choose."""
    holders = [Counter(row[s] for row in schedule.placement) for s in range(schedule.stages)]
    if any(len(set(count.values())) > 1 for count in holders) or not all(schedule.orders):
        return  # devices that hold nothing, or a stage more often than others, take no part in sums
    check(whole(schedule, sync))


def quickest(rows: Sequence[Program], schedule: Schedule, transfer: float) -> float:
    """End of the last operation where each stream has a queue: kernels of tasks take 1, transfers ``transfer``."""
    devices = operations([rows], schedule.microbatches)
    ends: list[list[float]] = [[0.0] * len(ops) for ops in devices]
    where: dict[object, list[tuple[int, int]]] = {}
    for p, ops in enumerate(devices):
        for i, op in enumerate(ops):
            if op.meets is not None:
                where.setdefault(op.meets, []).append((p, i))
    moved = True
    while moved:  # the least fixed point of "starts when all that it waits for has ended"
        moved = False
        for p, ops in enumerate(devices):
            for i, op in enumerate(ops):
                starts = []
                for q, j in where.get(op.meets, [(p, i)]):
                    other = devices[q][j]
                    earlier = [ends[q][k] for k in range(j) if devices[q][k].stream == other.stream]
                    starts += [max(earlier, default=0.0), *(ends[q][k] for k in other.after)]
                cost = transfer if op.meets is not None and op.stream != HOST else float(op.name[0].isdigit())
                if (end := max(starts) + cost) > ends[p][i]:
                    ends[p][i], moved = end, True
    return max(map(max, ends))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "chimera"])
def test_the_order_costs_nothing_where_each_stream_has_its_queue(name: str) -> None:
    schedule = whole(generate(name, Shape(devices=2, microbatches=4, chunks=2 if name.startswith("inter") else 1)))
    plain = as_lowered(schedule)
    assert quickest(safe_order([plain], 4)[0], schedule, 0.3) == pytest.approx(quickest(plain, schedule, 0.3))


# Sharded data parallelism on GPUs: no order of transfers, gathers and reduce-scatters deadlocks.


SYNCHRONOUS = [name for name in SCHEDULES if not name.startswith("pipedream")]
SOME = ("1f1b", "interleaved-1f1b", "zb-v", "chimera", "zeropp")


def sharded(
    schedule: Schedule, level: int, gather: Gather, copies: int = 2, group: int | None = None, sync: Sync = "lazy",
    ahead: int = 1,
) -> Schedule:  # fmt: skip
    result = replicate(shard(schedule, level, gather=gather, unit=2, group=group, ahead=ahead), copies)
    result = add_updates(place_gradient_sync(result, sync))
    verify(result)
    return result


def sharded_forwards(schedule: Schedule) -> list[Program]:
    return programs(forwards_alone(schedule))


def proven(schedule: Schedule, ahead: bool = False) -> Iterator[list[list[Op]]]:
    """What devices issue in two training steps and in a validation, as the runtime orders them."""
    members, count = shard_members(schedule.sharding, schedule.placement), schedule.microbatches
    train, evaluate = gpu_programs(
        step_programs(schedule, ahead), sharded_forwards(schedule), count, schedule.versions, members
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
def test_named_sharded_schedules_cannot_deadlock(name: str) -> None:
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
        gpu_programs({WHOLE: planted}, sharded_forwards(schedule), count, "flush", members)


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
