"""A worker's shards are stored by a thread, from a copy in host memory, while the worker trains on.

As torch's ``torch.distributed.checkpoint.async_save``: what a save costs the training is the copy. There is at most one
write under way; whoever begins another one waits for it, because both use the same memory. A shard is stored as a file
of the checkpoint, in Ray's object store where its node does not share the run's directory, or with keepers.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError
from safetensors.torch import load
from torch import Tensor

from raypipe.checkpoint import Checkpoint, ShardInfo, Snapshot
from raypipe.errors import TransportError
from raypipe.runtime.executor.step import StepResult, Written
from raypipe.runtime.hosts.node_files import SentShard

Write = Callable[[Path, str, Snapshot], ShardInfo]
"""Writes a copy as a file of that name in a folder."""


class Handed(NamedTuple):
    """The outcome of sending a shard to keepers."""

    info: ShardInfo | None
    """None if no keeper has it."""
    lost: bool
    """Whether one of them is gone."""
    processor_s: float = 0.0
    """Processor time that they took."""


Store = Callable[[str, Snapshot], ShardInfo | SentShard | Handed]
"""Stores a copy under that name."""
AT_ONCE = 4
"""Blocks of a copy that are under way to keepers at once."""
NICENESS = 10
"""Of the thread, so that on a busy machine it takes no core from training."""


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """A worker's report of a save when it can train on."""

    broken: str | None
    """Key of a tensor that is infinite or not a number, so that there must be no checkpoint; None if all are finite."""
    stall_s: float
    """Seconds in which the worker could not train."""
    waited_s: float
    """Those of them in which it waited for the write of the save before."""
    written: tuple[Written, ...]
    """The writes that have ended and were not reported yet: that of the save before, or this one's."""


def writes_of(results: Iterable[StepResult | SaveBegun | Written | None]) -> Iterator[Written]:
    """Yield the writes that workers report with what they do; None stands for a result that was lost."""
    for result in results:
        written = result if isinstance(result, Written) else getattr(result, "written", None)
        yield from (one for one in (written if isinstance(written, tuple) else (written,)) if one is not None)


def shard_name(rank: int) -> str:
    """Return the name of a worker's shard, without the ending of its file."""
    return f"rank-{rank:05d}"


class ShardWriter:
    """Writes one worker's shards, one after another."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, "raypipe-save", _be_nice)
        self._written: Future[Written] | None = None
        """The write that is under way, or has not been reported."""

    def begin(self, rank: int, number: int, tensors: Mapping[str, Tensor], store: Store) -> None:
        """Copy the tensors of a save, and begin to store them. No other write may be under way.

        Args:
            rank: the worker's.
            number: that of the save.
            tensors: what to write; nothing is written if there are none.
            store: how.
        """
        assert self._written is None
        if tensors:
            self._snapshot.take(tensors)
            self._written = self._thread.submit(self._work, rank, number, store)
        else:
            self._written = Future()
            self._written.set_result(Written(rank, number, None, 0.0))

    def _work(self, rank: int, number: int, store: Store) -> Written:
        began, used_s = time.monotonic(), time.thread_time()
        stored = store(shard_name(rank), self._snapshot)
        seconds, used_s = time.monotonic() - began, time.thread_time() - used_s
        if isinstance(stored, Handed):
            return Written(rank, number, stored.info, seconds, stored.lost, used_s + stored.processor_s)
        return Written(rank, number, stored, seconds)

    def ended(self) -> Written | None:
        """Return the write that has ended, once; None if none has.

        Raises:
            CheckpointError: it failed.
        """
        return self.wait() if self._written is not None and self._written.done() else None

    def wait(self) -> Written | None:
        """As ``ended``, after waiting for the write that is under way."""
        written, self._written = self._written, None
        return None if written is None else written.result()

    def is_writing(self, timeout_s: float) -> bool:
        """Return whether the write that is under way has not ended in that time."""
        return self._written is not None and bool(wait([self._written], timeout_s).not_done)

    def arrive(self, lost: Future[str]) -> None:
        """Wait for the write that is under way, whose end is still to be told.

        Raises:
            TransportError: ``lost`` has ended first: a host has fallen silent, and the write may wait for that one.
        """
        if self._written is not None:
            either: list[Future[Any]] = [self._written, lost]
            wait(either, return_when=FIRST_COMPLETED)
            if not self._written.done():
                raise TransportError(f"the host at {lost.result()}", "does not answer", "see what became of it")

    def drop(self) -> None:
        """Wait for the write that is under way, forget it, and free the copy."""
        with suppress(Exception):
            self.wait()
        self._snapshot = Snapshot()


def _be_nice() -> None:
    with suppress(OSError):  # of Linux: elsewhere it is the process's, if it is anything
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def put_snapshot(name: str, snapshot: Snapshot) -> SentShard:
    """Put a worker's shard into the object store, for the driver to write."""
    references: list[Any] = []
    info = _by_block(name, snapshot, lambda block: references.append(ray.put(bytes(block))))
    return SentShard(info, tuple(references))


def send_snapshot(keepers: Sequence[Any], number: int, name: str, snapshot: Snapshot) -> Handed:
    """Send a worker's shard of copy ``number`` to keepers; one that is gone keeps it from none of the others."""
    living, used_s = list(keepers), 0.0
    under_way: deque[list[tuple[Any, Any]]] = deque()

    def settle() -> None:
        nonlocal used_s
        for keeper, call in under_way.popleft():
            try:
                used_s += ray.get(call) or 0.0
            except RayError:
                if keeper in living:
                    living.remove(keeper)

    def send(block: bytes | memoryview) -> None:
        put = ray.put(np.frombuffer(block, dtype=np.uint8))
        under_way.append([(keeper, keeper.take.remote(number, name, put)) for keeper in living])
        if len(under_way) >= AT_ONCE:
            settle()

    try:
        info = _by_block(name, snapshot, send)
    except RayError:  # this node's object store
        return Handed(None, True)
    told = pickle.dumps(info)
    # Before the wait for what is under way, which may be long where a node does not answer.
    under_way.append([(keeper, keeper.finish.remote(number, name, info.bytes, told)) for keeper in living])
    while under_way:
        settle()
    return Handed(info if living else None, len(living) < len(keepers), used_s)


def _by_block(name: str, snapshot: Snapshot, take: Callable[[bytes | memoryview], None]) -> ShardInfo:
    """Hand each block of a shard's file to ``take``; return what the manifest lists of it."""
    digest, size = hashlib.sha256(), 0
    for block in snapshot.blocks():
        digest.update(block)
        size += len(block)
        take(block)
    return ShardInfo(f"{name}.safetensors", size, digest.hexdigest(), snapshot.keys)


# What keepers hold (``keeper``) is read as a checkpoint is, without a disk.


@dataclass(frozen=True)
class KeptShard:
    """A worker's shard of a copy, and who holds it."""

    number: int
    """Of the copy."""
    info: ShardInfo
    keepers: tuple[Any, ...]

    def blocks(self) -> tuple[Any, ...]:
        """Return references of its blocks, in order.

        Raises:
            TransportError: nobody holds it any more.
        """
        for keeper in self.keepers:
            try:
                blocks: tuple[Any, ...] = ray.get(keeper.give.remote(self.number, Path(self.info.file).stem))
            except RayError:
                continue
            return blocks
        raise TransportError(self.info.file, "is kept by nobody any more", "restart from the last checkpoint")


@dataclass(frozen=True)
class KeptCopy(Checkpoint):
    """The state of a run after some step, in the memory of keepers."""

    shards: tuple[KeptShard, ...] = field(default=())

    @staticmethod
    def of(step: int, meta: dict[str, Any], shards: Iterable[KeptShard]) -> KeptCopy:
        """Return the copy that consists of these shards."""
        shards = tuple(shards)
        files = {key: shard.info.file for shard in shards for key in shard.info.keys}
        return KeptCopy(Path(f"the copy of step {step}"), step, meta, files, shards)

    def _read_stored(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Read from whoever holds the shards.

        Raises:
            TransportError: nobody holds one of its shards as it was sent.
        """
        by_file = {shard.info.file: shard for shard in self.shards}
        fetched = cache(lambda file: _tensors(by_file[file]))
        return {key: fetched(self.files[key])[key] for key in keys}


def _tensors(shard: KeptShard) -> dict[str, Tensor]:
    content = b"".join(bytes(block) for block in ray.get(list(shard.blocks())))
    if hashlib.sha256(content).hexdigest() != shard.info.sha256:
        why = "is not what its worker sent"
        raise TransportError(shard.info.file, why, "restart from the last checkpoint; memory is at fault")
    result: dict[str, Tensor] = load(content)
    return result
