"""A worker's shards are written by a thread, from a copy in host memory, while the worker trains on.

As torch's ``torch.distributed.checkpoint.async_save``: what a save costs the training is the copy. There is at most one
write under way; whoever begins another one waits for it, because both use the same memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from raypipe.checkpoint import ShardInfo, Snapshot
from raypipe.runtime.executor.step import Written
from raypipe.runtime.hosts import node_files
from raypipe.runtime.hosts.node_files import SentShard

Write = Callable[[Path, str, Snapshot], ShardInfo]
"""Writes a copy as a file of that name in a folder."""
Send = Callable[[str, Snapshot], ShardInfo | None]
"""Sends a copy under that name; returns None if it did not arrive."""
Store = Callable[[str], ShardInfo | SentShard | None]
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


class ShardWriter:
    """Writes one worker's shards, one after another."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._error: Exception | None = None

    def begin(self, rank: int, number: int, tensors: Mapping[str, Tensor], folder: Path, sends: bool) -> None:
        """Copy the tensors of a save, and begin to write them. No other write may be under way.

        Args:
            rank: the worker's.
            number: that of the save.
            tensors: what to write; nothing is written if there are none.
            folder: where to.
            sends: whether to move the file from there into Ray's object store.
        """

        def write(name: str) -> ShardInfo | SentShard:
            info = self._write(folder, name, self._snapshot)
            return node_files.sent_shard(info, folder) if sends else info

        self._begin(rank, number, tensors, write)

    def send(self, rank: int, number: int, tensors: Mapping[str, Tensor], send: Send) -> None:
        """As ``begin``, to another process: ``send`` gets the shard's name and the copy."""
        self._begin(rank, number, tensors, lambda name: send(name, self._snapshot))

    def _begin(self, rank: int, number: int, tensors: Mapping[str, Tensor], store: Store) -> None:
        assert self._thread is None
        if not tensors:
            self._written = Written(rank, number, None, 0.0)
            return
        self._snapshot.take(tensors)
        self._thread = threading.Thread(target=self._work, args=(rank, number, store), name="raypipe-save", daemon=True)
        self._thread.start()

    def _work(self, rank: int, number: int, store: Store) -> None:
        with suppress(OSError):  # of Linux: elsewhere it is the process's, if it is anything
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        began = time.monotonic()
        try:
            shard = store(f"rank-{rank:05d}")
            self._written = Written(rank, number, shard, time.monotonic() - began, lost=shard is None)
        except Exception as error:
            self._error = error

    def ended(self) -> Written | None:
        """Return the write that has ended, once; None if none has.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> Written | None:
        """As ``ended``, after waiting for the write that is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        written, self._written = self._written, None
        return written

    def drop(self) -> None:
        """Wait for the write that is under way, forget it, and free the copy."""
        with suppress(Exception):
            self.wait()
        self._snapshot = Snapshot()
