"""Programs for GPUs: their transfers in an order that cannot deadlock, and the proof of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raypipe.schedule.ir import Versions
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.schedule.lowering.gpu_operations import gpu_operations
from raypipe.schedule.lowering.messages_in_flight import unreceived_messages
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.lowering.safe_order import safe_order
from raypipe.schedule.lowering.stream_order import check_streams
from raypipe.schedule.sharding.members import ShardMember, StageKey

FILLS, RUNS, DRAINS = (True, False), (False, False), (False, True)
"""The parts of an asynchronous schedule, in order."""


def gpu_programs(
    train: Mapping[Part, Sequence[Program]],
    evaluate: Sequence[Program],
    microbatches: int,
    versions: Versions,
    shards: Mapping[StageKey, ShardMember] | None = None,
) -> tuple[dict[Part, list[Program]], list[Program]]:
    """Order the transfers of a plan's programs, and check that no execution of them on GPUs can deadlock.

    It is checked for a single hardware queue, which covers any number (``stream_order``). One tensor rank stands for
    all, because each of them issues the same; sums of tied parameters come after all transfers of a step, in one order.

    Args:
        train: per way that a step begins and ends, the programs of all devices.
        evaluate: the programs of a validation batch.
        microbatches: N, the number of micro-batch ids in a step.
        versions: the schedule's.
        shards: its sharded stage replicas (``sharding.members``).

    Raises:
        ScheduleError: devices could wait for each other for ever; it names their operations.
    """
    stashes = versions == "stash"
    done: dict[Part, list[Program]] = {}
    if WHOLE in train:
        done[WHOLE] = safe_order([train[WHOLE]], microbatches, stashes, shards)[0]
    if RUNS in train:
        in_a_row = (FILLS, RUNS, DRAINS)
        ordered = safe_order([train[part] for part in in_a_row], microbatches, stashes)
        done.update(zip(in_a_row, ordered, strict=True))
    validation = safe_order([evaluate], microbatches, stashes, shards)[0]
    done[WHOLE], validation = limited(done[WHOLE]), limited(validation)
    runs = [[done[WHOLE]]]
    if RUNS in done:
        runs += [[done[part] for part in row] for row in ((FILLS, DRAINS), (FILLS, RUNS, RUNS, DRAINS))]
    for steps in runs:
        operations = gpu_operations(steps, microbatches, stashes=stashes, shards=shards)
        check_streams(operations.processes, 1, operations.members)
    operations = gpu_operations([validation], microbatches, stashes=stashes, shards=shards)
    check_streams(operations.processes, 1, operations.members)
    return done, validation


def limited(programs: Sequence[Program]) -> list[Program]:
    """Let hosts run no further ahead of their GPUs than messages could be unreceived anyway.

    A host issues sends, each with a copy of its message, long before the GPU comes to them. With this limit a device
    holds no more copies than the memory model counts. The wait costs the GPU no time: by the time the task that sends
    a message ends there, so many earlier ones have been used that there is room. And it cannot deadlock: a host waits
    only for transfers that it has issued before, and in the order that ``safe_order`` found, each of those can run
    before anything that is issued later. Steps that leave messages to the next one (asynchronous ones) have no limit.
    """
    return [
        replace(program, unreceived=limits)
        for program, limits in zip(programs, unreceived_messages(programs), strict=True)
    ]
