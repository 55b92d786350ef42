"""The deadlock check: against a plain executor of hardware queues, on planted deadlocks, and on hand-written orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule.lowering.stream_order import HOST, GpuOperation, check_streams, find_circle, streams

Queues = Sequence[Mapping[str, int]]
"""Per process, the hardware queue of each stream."""


def finishes(processes: Sequence[Sequence[GpuOperation]], queue_of: Queues, seed: int) -> bool:
    """Execute step by step in a random order: hosts issue, heads of queues run; True if nothing is left.

    This knows hosts, queues and heads, where the check knows only who waits for whom.
    """
    rng = random.Random(seed)
    issued = [0] * len(processes)
    reached: set[tuple[int, int]] = set()
    done: set[tuple[int, int]] = set()
    queues: list[dict[int, list[int]]] = [{} for _ in processes]
    ends: dict[Hashable, list[tuple[int, int]]] = {}
    for p, process in enumerate(processes):
        for i, op in enumerate(process):
            for key in op.meetings:
                ends.setdefault(key, []).append((p, i))

    def host_waits(p: int) -> bool:
        return issued[p] > 0 and processes[p][issued[p] - 1].stream == HOST and (p, issued[p] - 1) not in done

    def at_head(p: int, i: int) -> bool:
        op = processes[p][i]
        if i >= issued[p] or any((p, j) not in done for j in op.after):
            return False
        return op.stream == HOST or queues[p][queue_of[p][op.stream]][0] == i

    def together(p: int, i: int) -> set[tuple[int, int]]:
        """The operations that run at once with this one."""
        found, todo = {(p, i)}, [(p, i)]
        while todo:
            q, j = todo.pop()
            for key in processes[q][j].meetings:
                todo += [end for end in ends[key] if end not in found]
                found.update(ends[key])
        return found

    while True:
        moves: list[tuple[str, int, int]] = []
        for p, process in enumerate(processes):
            if issued[p] < len(process) and not host_waits(p):
                if (p, issued[p]) not in reached:
                    moves.append(("reach", p, issued[p]))
                elif all(end in reached for key in process[issued[p]].announced for end in ends[key] if end[0] != p):
                    moves.append(("issue", p, issued[p]))
            heads = [queue[0] for queue in queues[p].values() if queue]
            if host_waits(p):
                heads.append(issued[p] - 1)
            moves += [("run", p, i) for i in heads if all(at_head(q, j) for q, j in together(p, i))]
        if not moves:
            return len(done) == sum(map(len, processes))
        move, p, i = rng.choice(moves)
        if move == "reach":
            reached.add((p, i))
        elif move == "issue":
            issued[p] += 1
            if (stream := processes[p][i].stream) != HOST:
                queues[p].setdefault(queue_of[p][stream], []).append(i)
        else:
            for q, j in together(p, i):
                done.add((q, j))
                if (stream := processes[q][j].stream) != HOST:
                    queues[q][queue_of[q][stream]].pop(0)


@st.composite
def programs(draw: st.DrawFn) -> list[list[GpuOperation]]:
    """Two or three processes with a few kernels, transfers (some grouped, some announced) and an all-reduce."""
    count = draw(st.integers(2, 3))
    parts: list[list[tuple[tuple[Hashable, ...], bool]]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(1, 4))):
        src, dst = draw(st.permutations(range(count)))[:2]
        parts[src].append(((("message", number),), False))
        parts[dst].append(((("message", number),), draw(st.booleans())))
    if draw(st.booleans()):
        for part in parts:
            part.append(((("sum",),), False))
    processes = []
    for part in parts:
        part += [((), False)] * draw(st.integers(0, 2))
        order = draw(st.permutations(part))
        process: list[GpuOperation] = []
        for meetings, announced in order:
            if process and meetings and process[-1].meetings and draw(st.integers(0, 3)) == 0:
                last = process.pop()  # one grouped call
                keys = (*last.meetings, *meetings)
                waits = (*last.announced, *(meetings if announced else ()))
                process.append(GpuOperation("group", last.stream, last.after, keys, waits))
                continue
            after = tuple(sorted(draw(st.sets(st.integers(0, len(process) - 1), max_size=2)))) if process else ()
            stream = draw(st.sampled_from(["a", "b", "c", HOST] if not meetings else ["a", "b", "c"]))
            process.append(GpuOperation("op", stream, after, meetings, meetings if announced else ()))
        processes.append(process)
    return processes


def members(processes: Sequence[Sequence[GpuOperation]]) -> dict[Hashable, int]:
    return {("sum",): len(processes)}


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(programs(), st.integers(0, 1000))
def test_agrees_with_an_executor_of_queues(processes: list[list[GpuOperation]], seed: int) -> None:
    """With k queues, the check says "finishes" if and only if every mapping of streams to k queues finishes."""
    names = [sorted({op.stream for op in process} - {HOST}) for process in processes]
    for queues in (1, 2, 3):
        mappings = []
        for own in names:
            if len(own) <= queues:
                mappings.append([dict(zip(own, range(len(own)), strict=True))])  # each stream has a queue of its own
            else:
                mappings.append(
                    [dict(zip(own, m, strict=True)) for m in itertools.product(range(queues), repeat=len(own))]
                )
        ends = [finishes(processes, one, seed) for one in itertools.product(*mappings)]
        assert all(ends) == (find_circle(processes, queues, members(processes)) is None)


@settings(max_examples=100, deadline=None)
@given(programs(), st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
def test_the_end_does_not_depend_on_the_order_of_events(processes: list[list[GpuOperation]], seeds: list[int]) -> None:
    mapping: Queues = [dict.fromkeys("abc", 0)] * len(processes)
    assert len({finishes(processes, mapping, seed) for seed in seeds}) == 1


def opposite(swap: bool) -> list[list[GpuOperation]]:
    """Two devices that send to each other on streams of their own; ``swap``: the second one receives first."""
    first = [GpuOperation("send x", "out", (), ("x",)), GpuOperation("receive y", "in", (), ("y",))]
    second = [GpuOperation("send y", "out", (), ("y",)), GpuOperation("receive x", "in", (), ("x",))]
    return [first, second[::-1] if swap else second]


def test_opposite_sends_need_two_queues() -> None:
    assert find_circle(opposite(False), 2) is None
    with pytest.raises(ScheduleError) as error:
        check_streams(opposite(False), 1)
    told = str(error.value)
    assert "1 hardware queue" in told
    assert "receive y (device 0) is queued behind; receive x (device 1) is queued behind" in told
    assert "CUDA_DEVICE_MAX_CONNECTIONS to at least 2" in told
    check_streams(opposite(True), 1)


def test_one_grouped_call_needs_no_order() -> None:
    both = [GpuOperation("exchange", "pair", (), ("x", "y"))]
    check_streams([both, both], 1)
    assert find_circle([both, [*opposite(False)[1]]], 1) is not None, "the other device must group as well"


def test_swapped_sends_of_one_channel_deadlock_with_any_number_of_queues() -> None:
    sends = [GpuOperation("send x", "out", (), ("x",)), GpuOperation("send y", "out", (), ("y",))]
    receives = [GpuOperation("receive x", "in", (), ("x",)), GpuOperation("receive y", "in", (), ("y",))]
    assert find_circle([sends, receives], 1) is None
    for queues in (1, 2, 4, 8, 32):
        assert find_circle([sends[::-1], receives], queues) is not None


def test_a_host_that_waits_blocks_what_it_would_issue() -> None:
    """Device 0 reads a number that depends on a receive whose send device 1 issues only after an announcement of it."""
    first = [
        GpuOperation("receive x", "in", (), ("x",)),
        GpuOperation("read", HOST, (0,)),
        GpuOperation("send y", "out", (), ("y",)),
    ]
    second = [GpuOperation("receive y", "in", (), ("y",), ("y",)), GpuOperation("send x", "out", (), ("x",))]
    for queues in (1, 8):
        assert find_circle([first, second], queues) is not None
    assert find_circle([[first[0], first[2], first[1]], second], 8) is None


def test_a_missing_end_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"device 0, send x: 1 of 2 devices take part"):
        find_circle([[GpuOperation("send x", "out", (), ("x",))], []], 1)


def test_streams_are_counted_without_the_host() -> None:
    assert streams([GpuOperation("k", "compute"), GpuOperation("h", HOST), GpuOperation("s", "out")]) == 2
