"""The samples of a run: the actor that streams them, and what feeds them to the stages of a device.

There is one actor in a run, on the driver's node. It keeps a window of packed blocks, which all copies of the pipeline
share; a device asks for the rows of its own copy alone. What it answers depends on nothing but (split, step, rows): if
its process dies, Ray starts another one, which finds the place again.

Where there are prepared arrays instead, a device reads those on its own node.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from raypipe.data import open_data, token_budget
from raypipe.data.documents.prepared import Blocks, PreparedDocuments
from raypipe.data.documents.samples import BlockOrder, Tokens, Windows
from raypipe.data.sample_order import SPLITS, Split, sample_keys
from raypipe.errors import RaypipeError, SpecError, TransportError
from raypipe.files import read_json, write_whole
from raypipe.job.spec import JobSpec
from raypipe.models import DTYPES, LayeredModel, Lengths, Task
from raypipe.models.current_slice import own_chunks
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.stage import StageModule
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.sharding import StageKey

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


# What a device reads of the stream of samples: the rows of its own micro-batches, asked for some steps ahead.

AGAIN_S = 0.2
"""Pause before samples are asked for again."""
AHEAD = 2
"""Steps whose samples are on their way while a device computes another one."""
TRIES = 3
"""How often to ask again; a process that is being started anew answers the first time, or the second."""


class StreamFeed(Feed):
    """Feeds a device from a ``SampleStream``.

    Args:
        stream: the actor.
        job: the job.
        task: makes raw inputs of tokens.
        fields: the raw inputs that the device's stages need.
        samples: size of a micro-batch.
        device: the device.
        own: by split, the micro-batches of which the device's stages read raw inputs.
        left_out: mini-batches of the training data that are not used.
    """

    def __init__(
        self,
        stream: Any,
        job: JobSpec,
        task: Task,
        fields: Iterable[str],
        samples: int,
        device: torch.device,
        own: Mapping[Split, Collection[int]],
        left_out: int = 0,
    ) -> None:
        train = job.train
        super().__init__(None, task, fields, train.seed, train.batch, samples, device, DTYPES[train.dtype], left_out)
        self._stream, self._timeout_s = stream, train.message_timeout_s
        self._window = task.window(job.model.sequence or 1)
        self._own = {split: sorted(mbs) for split, mbs in own.items()}
        # Nobody needs what comes after the last step.
        self._ends: dict[Split, int] = {"train": train.steps + left_out, "val": train.eval_batches}
        self._asked: dict[tuple[Split, int], Any] = {}

    def _lengths_of(self, split: Split, step: int, mb: int) -> Lengths:
        """Return nothing, because samples are equally long."""
        return {}

    def _rows_at(self, split: Split) -> list[int]:
        return [mb * self.samples + row for mb in self._own[split] for row in range(self.samples)]

    def _rows_of(self, split: Split, mb: int) -> slice:
        place = self._own[split].index(mb)
        return slice(place * self.samples, (place + 1) * self.samples)

    def _read(self, split: Split, at: int) -> dict[str, Tensor]:
        rows = self._rows_at(split)
        for step in range(at, min(at + 1 + AHEAD, max(at + 1, self._ends[split]))):
            if (split, step) not in self._asked:
                self._asked[split, step] = self._stream.rows.remote(split, step, rows)
        for old in [key for key in self._asked if key[0] == split and key[1] < at]:
            del self._asked[old]
        tokens = torch.from_numpy(self._arrived(split, at).astype(np.int64))
        keys = sample_keys(split, self.seed, at, self.batch)
        return self.task.from_text(tokens, [keys[row] for row in rows])

    def _arrived(self, split: Split, at: int) -> Any:
        ref = self._asked.pop((split, at))
        where = f"the samples of {'step' if split == 'train' else 'validation batch'} {at + 1}"
        try:
            return self._until_it_lives(ref, split, at)
        except ray.exceptions.GetTimeoutError:
            fix = "see whether its node is overloaded; raise data.num_workers, or train.message_timeout_s"
            raise TransportError(where, f"did not come within {self._timeout_s:g} s", fix) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaypipeError):
                raise error.cause from None
            raise

    def _until_it_lives(self, ref: Any, split: Split, at: int) -> Any:
        """Wait for samples; ask again where the actor's process is being started anew, which such a call waits for."""
        deadline = time.monotonic() + self._timeout_s
        tries = 0
        while True:
            try:
                return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayActorError:  # Ray does not repeat every call that was under way
                tries += 1
                if tries > TRIES or time.monotonic() > deadline:  # the run has ended, and its stream with it
                    raise
                time.sleep(AGAIN_S)
                ref = self._stream.rows.remote(split, at, self._rows_at(split))

    def _count(self, split: Split, at: int, read: Mapping[str, Tensor]) -> int:
        """Count the targets of the whole mini-batch, which is read in part: no token decides what is a target."""
        nothing = torch.zeros(self.batch, self._window + 1, dtype=torch.int64)
        return self.task.targets(self.task.from_text(nothing, sample_keys(split, self.seed, at, self.batch)))


Modules = Mapping[StageKey, StageModule]


def device_feed(setup: Setup, model: LayeredModel, modules: Modules, device: torch.device, reads_whole: bool) -> Feed:
    """Return what reads the raw inputs of a device's stages.

    Args:
        setup: that of the device's worker.
        model: the whole model.
        modules: the stage replicas of the device.
        device: where the samples go.
        reads_whole: see ``open_data``.
    """
    feed = _whole_feed(setup, model, modules, device, reads_whole)
    if setup.slices > 1:
        feed.cut(setup.slices, model.slice_lengths(setup.slices))
    if (context := setup.parallel.context) > 1:
        own = own_chunks(setup.ranks["context"], context)
        feed.hold(own, 2 * context, model.chunk_lengths(context), setup.copies)
    return feed


def _whole_feed(setup: Setup, model: LayeredModel, modules: Modules, device: torch.device, reads_whole: bool) -> Feed:
    """See ``device_feed``; of whole sequences."""
    job, task, samples = setup.job, model.task, setup.samples_per_microbatch
    reads = {name for module in modules.values() for name in module.reads}
    if setup.samples is not None:
        own: dict[Split, set[int]] = {
            "train": _microbatches_read(setup.train.values(), modules, setup),
            "val": _microbatches_read([setup.evaluate], modules, setup),
        }
        return StreamFeed(setup.samples, job, task, reads, samples, device, own, setup.left_out)
    budget = token_budget(job, setup.parallel.sample_copies, model)
    multiple = job.data.pad_to_multiple_of
    if setup.parallel.sequence_parallel:
        multiple = lcm(multiple, setup.parallel.tensor)
    if setup.parallel.context > 1:
        multiple = lcm(multiple, 2 * setup.parallel.context)
    data = open_data(setup.data, task, multiple, reads, reads_whole, budget)
    return Feed(
        data, task, reads, job.train.seed, job.train.batch, samples, device, DTYPES[job.train.dtype], setup.left_out
    )


def _microbatches_read(programs: Iterable[Program], modules: Modules, setup: Setup) -> set[int]:
    """Return the micro-batches of the data of which programs read raw inputs."""
    tasks = [action.task for program in programs for action in program.actions]
    held = [task for task in tasks if (task.stage, task.replica) in modules]
    reading = [task for task in held if modules[task.stage, task.replica].reads]
    return {setup.copies.of_data(mb % setup.microbatches // setup.slices) for task in reading for mb in task.mbs}
