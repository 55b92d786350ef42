"""The actor that gives each device the samples of its micro-batches, step by step.

There is one of it in a run, on the driver's node. It keeps a window of packed blocks, which all copies of the pipeline
share; a device asks for the rows of its own copy alone. What it answers depends on nothing but (split, step, rows): if
its process dies, Ray starts another one, which finds the place again.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.data.documents.prepared import Blocks, PreparedDocuments
from raypipe.data.documents.samples import BlockOrder, Tokens, Windows
from raypipe.data.sample_order import SPLITS, Split
from raypipe.errors import SpecError
from raypipe.files import read_json, write_whole
from raypipe.job.spec import JobSpec

# Blocks of documents, read, tokenised and packed by Ray Data while training goes on.
#
# Ray Data runs the tasks, keeps as many of them under way as ``data.num_workers`` says, holds back where memory would
# grow, and keeps the order of the blocks. Which blocks those are is decided here: Ray Data's own readers begin at the
# beginning and choose their blocks themselves, so they can neither go on in the middle of an epoch nor shuffle in a way
# that the number of consumers does not change. The tasks reserve no CPU, because a run may have reserved all of them.

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
    none_left = object()
    thread = ThreadPoolExecutor(1, "raypipe-read-ahead")
    try:
        coming = deque(thread.submit(next, items, none_left) for _ in range(max(1, ahead)))
        while (item := coming.popleft().result()) is not none_left:
            coming.append(thread.submit(next, items, none_left))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


COUNTS = "sample_counts.json"
"""File of the run's directory: samples of each block that was read, so that a resumed run finds its place at once."""
APART_STEPS = 8
"""Steps that the devices of a run are apart at most, with those that they ask for ahead."""


class SampleStream:
    """Samples of packed documents, in an order that the plan does not change.

    Args:
        directory: the run's directory.
        seed: ``train.seed``.
        batch: ``train.batch``.
        workers: ``data.num_workers``.
    """

    def __init__(self, directory: Path, seed: int, batch: int, workers: int) -> None:
        self._directory, self._batch = directory, batch
        prepared = PreparedDocuments.open(directory / "data")
        self._counts = _read_counts(directory / COUNTS)
        self._known = self._known_now()
        self._windows: dict[Split, Windows] = {}
        for split in SPLITS:
            blocks = prepared.splits[split].blocks
            order = BlockOrder(split, seed, len(blocks), prepared.together)
            packed = RayDataBlocks(directory / "data", split, workers, min(prepared.together, len(blocks)))
            keep = APART_STEPS * batch
            self._windows[split] = Windows(order, prepared.window, self._counts[split], packed, keep)

    def rows(self, split: Split, step: int, rows: Sequence[int]) -> Tokens:
        """Return samples of a step's mini-batch, ``[len(rows), window + 1]``.

        Raises:
            SpecError: the documents cannot be read, or are too few.
        """
        result = self._windows[split].rows([step * self._batch + row for row in rows])
        if (known := self._known_now()) != self._known:
            self._known = known
            text = json.dumps({split: sorted(counts.items()) for split, counts in self._counts.items()})
            write_whole(self._directory / COUNTS, text.encode())
        return result

    def begin(self, step: int) -> None:
        """Read what the first step and the first validation need."""
        self.rows("train", step, [0])
        self.rows("val", 0, [0])

    def _known_now(self) -> int:
        return sum(len(counts) for counts in self._counts.values())


def _read_counts(path: Path) -> dict[Split, dict[int, int]]:
    try:
        known = read_json(path)
        return {split: {int(block): int(count) for block, count in known[split]} for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: they are counted again
        return {split: {} for split in SPLITS}


@contextmanager
def samples_streamed(job: JobSpec, directory: Path, step: int, run_id: str) -> Iterator[Any]:
    """Stream a job's samples while the block lasts; yield the actor, or None where the workers read files.

    Args:
        job: the job.
        directory: the run's directory.
        step: the first step.
        run_id: that of the attempt.
    """
    if job.data.type != "documents":
        yield None
        return
    node = ray.get_runtime_context().get_node_id()
    stream = (
        ray.remote(SampleStream)
        .options(
            name=f"samples · {run_id}",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(directory, job.train.seed, job.train.batch, job.data.num_workers)
    )
    stream.begin.remote(step)
    try:
        yield stream
    finally:
        ray.kill(stream)
