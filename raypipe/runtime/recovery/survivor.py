"""What a device does that outlives another one: it leaves the groups they shared, then finishes or forgets its step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.standing import Facts, Standing
from raypipe.runtime.setup.communicators import Communicators
from raypipe.runtime.transport.waiting import Progress
from raypipe.runtime.update.updates import KnownShares


def part(executor: Executor, communicators: Communicators) -> Standing:
    """Leave the channels and groups of a device for good, and say how far it is. Call it once.

    Its neighbours see that the connections end, so whoever waits for this device stops waiting, whatever for.
    Parameters, optimizer state and gradients stay. Groups whose collectives are still under way go in a thread: Gloo
    waits for these collectives, which end when the other members leave as well.
    """
    assert executor.ledger is not None
    executor.ledger.leave()
    standing = executor.ledger.standing(executor.updates.pending)
    leave(executor, communicators)
    return standing


def leave(executor: Executor, communicators: Communicators) -> None:
    """Leave the channels and groups of a device for good, also while a collective is under way."""
    held = communicators.leave()
    held += executor.sync.leave()
    held += executor.shards.leave()
    if not executor.sync.complete:  # else this device knows the norm by itself, in no group
        executor.updates.shares = KnownShares([])
    executor.senders, executor.receivers, executor.outgoing = {}, {}, Progress()
    threading.Thread(target=_drop, args=(held.clear,), name="raypipe-leave", daemon=True).start()


def _drop(clear: Callable[[], Any]) -> None:
    clear()
    gc.collect()  # what the errors of failed waits still refer to


def settle(executor: Executor, standing: Standing, target: int, facts: Facts | None) -> None:
    """Bring parameters and optimizer state to the end of ``target`` steps (``standing.agreed_steps``).

    Args:
        executor: the device's, after ``part``.
        standing: what ``part`` returned.
        target: number of steps done.
        facts: of step ``target - 1``, as somebody has heard them; None if nobody has, and nobody needs them.
    """
    updates, ledger = executor.updates, executor.ledger
    assert ledger is not None
    if standing.done < target:
        assert facts is not None
        for key in executor.modules:
            if key not in ledger.updated:
                executor.update_stage(key)
        if updates.pending:
            if not executor.sync.complete:  # else this device knows the norm by itself
                updates.shares = KnownShares(list(facts.norm_squared))
            updates.commit(executor.outgoing.push)
    else:
        updates.undo()
    for key in executor.modules:
        executor.sync.drop(key)
    executor.forget()
