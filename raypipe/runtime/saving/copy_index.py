"""Which copies of a run's state are complete, and the processes that hold them: an actor that outlives the driver.

Ray ends an actor when the process that created it dies. So the process that starts the run creates the index, and the
index creates the keepers: after the driver's death its successor finds both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.checkpoint import ShardInfo
from raypipe.runtime.state.keeper import Keeper

NUMBERS = 1 << 32
"""Copies that each driver may number."""


@dataclass(slots=True)
class Copy:
    """The state after ``step`` steps, as far as the keepers have it."""

    number: int
    """Negative, since those of saves are not; later copies have smaller ones."""
    step: int
    left_out: int
    """Number of mini-batches of training data that were left out before."""
    nodes: list[tuple[str, ...]]
    """Of the keepers, by rank."""
    shards: dict[int, ShardInfo | None] = field(default_factory=dict)
    """By rank; None for a worker that saves nothing."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer that a driver gets from the index when it begins."""

    first: int
    """The number of its first copy."""
    held: Copy | None
    """The newest complete copy."""
    keepers: dict[str, Any]
    """By Ray's id of the node."""


class CopyIndex:
    """The actor."""

    def __init__(self) -> None:
        self._drivers = 0
        self._held: Copy | None = None
        self._keepers: dict[str, Any] = {}

    def attach(self) -> Attached:
        """Serve another driver, whose numbers follow those of all before."""
        self._drivers += 1
        return Attached(-1 - (self._drivers - 1) * NUMBERS, self._held, dict(self._keepers))

    def keeper(self, node: str) -> Any:
        """Return the keeper of a node, which may have to start."""
        if node not in self._keepers:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            self._keepers[node] = ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=where).remote()
        return self._keepers[node]

    def lost(self, node: str) -> None:
        """Forget the keeper of a node, which is gone."""
        self._keepers.pop(node, None)

    def hold(self, copy: Copy) -> None:
        """Take in that a copy is complete; the keepers drop those before it."""
        self._held = copy
        for keeper in self._keepers.values():
            keeper.drop_before.remote(copy.number)

    def forget(self) -> None:
        """Take in that the newest copy is not to be used any more."""
        self._held = None


def start_index(**options: Any) -> Any:
    """Start an index on this node, which ends with this process; ``options`` are those of Ray's actors."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(CopyIndex).options(num_cpus=0, scheduling_strategy=here, **options).remote()


@contextmanager
def copies_kept(run_id: str, every: int) -> Iterator[None]:
    """Keep the copies of a run that makes some while the block lasts, whatever becomes of its drivers."""
    if not every:
        yield
        return
    index = start_index(name=_name(run_id))
    try:
        yield
    finally:
        ray.kill(index)


def index_of(run_id: str) -> Any | None:
    """Return the index of a run; None if there is none."""
    try:
        return ray.get_actor(_name(run_id))
    except ValueError:
        return None


def _name(run_id: str) -> str:
    return f"copies · {run_id}"
