"""The actor that gives each device the samples of its micro-batches, step by step.

There is one of it in a run, on the driver's node. It keeps a window of packed blocks, which all copies of the pipeline
share; a device asks for the rows of its own copy alone. What it answers depends on nothing but (split, step, rows): if
its process dies, Ray starts another one, which finds the place again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.atomic_write import write_whole
from raypipe.data.documents.prepared import PreparedDocuments
from raypipe.data.documents.tokens import Tokens
from raypipe.data.documents.windows import BlockOrder, Windows
from raypipe.data.sample_order import SPLITS, Split
from raypipe.files import read_json
from raypipe.job.spec import JobSpec
from raypipe.runtime.samples.through_ray_data import RayDataBlocks

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
        found = self._windows[split].rows([step * self._batch + row for row in rows])
        if (known := self._known_now()) != self._known:
            self._known = known
            text = json.dumps({split: sorted(counts.items()) for split, counts in self._counts.items()})
            write_whole(self._directory / COUNTS, text.encode())
        return found

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
    stream = ray.remote(SampleStream).options(
        name=f"samples · {run_id}", num_cpus=0, max_restarts=-1, max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(directory, job.train.seed, job.train.batch, job.data.num_workers)  # fmt: skip
    stream.begin.remote(step)
    try:
        yield stream
    finally:
        ray.kill(stream)
