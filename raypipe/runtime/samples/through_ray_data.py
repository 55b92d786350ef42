"""Blocks of documents, read, tokenised and packed by Ray Data while training goes on.

Ray Data runs the tasks, keeps as many of them under way as ``data.num_workers`` says, holds back where memory would
grow, and keeps the order of the blocks. Which blocks those are is decided here: Ray Data's own readers begin at the
beginning and choose their blocks themselves, so they can neither go on in the middle of an epoch nor shuffle in a way
that the number of consumers does not change. The tasks reserve no CPU, because a run may have reserved all of them.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raypipe.data.documents.prepared import Blocks, PreparedDocuments
from raypipe.data.documents.tokens import Tokens
from raypipe.data.sample_order import Split
from raypipe.errors import SpecError

SPAN = 256
"""Blocks of one execution of Ray Data; the next one begins while its last blocks wait in the queue."""
LEAST_BYTES = 64 << 20
"""Of the object store, that an execution may fill, at least."""


@lru_cache(maxsize=4)
def _blocks(directory: Path, split: Split) -> Blocks:
    return PreparedDocuments.open(directory, check=False).splits[split]


def _pack(directory: Path, split: Split, batch: pa.Table) -> pa.Table:
    """Pack the blocks whose numbers are in a batch; Ray Data calls this in a process of its own."""
    blocks = _blocks(directory, split)
    tokens: list[bytes] = []
    wrong: list[list[str] | None] = []
    for number in batch.column("block").to_pylist():
        try:
            tokens.append(blocks.packed(number).tobytes())
            wrong.append(None)
        except SpecError as error:  # Ray Data would wrap it until nobody finds it again
            tokens.append(b"")
            wrong.append([error.where, error.why, error.fix])
    made = pa.array(tokens, pa.large_binary()), pa.array(wrong, pa.list_(pa.string()))
    return pa.table(made, names=["tokens", "wrong"])


class RayDataBlocks:
    """The packed blocks of one split; see ``windows.Packed``.

    Args:
        directory: folder of the prepared data, on this node.
        split: which of them.
        workers: tasks at the same time.
        ahead: blocks to have ready before they are asked for.
    """

    def __init__(self, directory: Path, split: Split, workers: int, ahead: int) -> None:
        self._directory, self._split, self._workers, self._ahead = directory, split, workers, ahead
        self.dtype = np.min_scalar_type(_blocks(directory, split).encoder.tokens - 1)

    def __call__(self, numbers: Iterator[int]) -> Iterator[Tokens]:
        """Yield the tokens of blocks in the order of ``numbers``; a thread works ahead."""
        return read_ahead(self._executed(numbers), self._ahead)

    def _executed(self, numbers: Iterator[int]) -> Iterator[Tokens]:
        import ray.data  # here, because it takes seconds

        self._set_up(ray.data.DataContext.get_current())
        pack = partial(_pack, self._directory, self._split)
        while some := [{"block": number} for number in islice(numbers, SPAN)]:
            items = ray.data.from_items(some, override_num_blocks=len(some))
            packed = items.map_batches(
                pack, batch_format="pyarrow", batch_size=None, num_cpus=0, concurrency=self._workers
            )
            for batch in packed.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=1):
                for one, wrong in zip(batch.column("tokens"), batch.column("wrong"), strict=True):
                    if wrong.is_valid:
                        raise SpecError(*wrong.as_py())
                    yield np.frombuffer(one.as_buffer(), self.dtype).copy()  # the object store gets its memory back

    def _set_up(self, context: Any) -> None:
        from ray.data import ExecutionResources
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        largest = max(sum(part.size for part in block) for block in _blocks(self._directory, self._split).blocks)
        room = max(LEAST_BYTES, 2 * (self._ahead + self._workers) * largest * self.dtype.itemsize)
        context.execution_options.resource_limits = ExecutionResources.for_limits(object_store_memory=room)
        # The documents are files of this node.
        node = ray.get_runtime_context().get_node_id()
        context.scheduling_strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")


def read_ahead(items: Iterator[Tokens], ahead: int) -> Iterator[Tokens]:
    """Yield the items of an iterator that a thread consumes up to ``ahead`` items early, until it is closed.

    >>> list(read_ahead(iter([np.array([1]), np.array([2])]), 1))
    [array([1]), array([2])]
    """
    ready: queue.Queue[tuple[Tokens | None, BaseException | None]] = queue.Queue(maxsize=max(1, ahead))
    closed = threading.Event()

    def put(item: Tokens | None, error: BaseException | None = None) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                ready.put((item, error), timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:
            put(None, error)

    threading.Thread(target=work, name="raypipe-read-ahead", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        closed.set()
