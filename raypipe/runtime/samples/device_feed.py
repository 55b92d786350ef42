"""Read the raw inputs of one device's stages: prepared arrays on its node, or a stream of samples."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from math import lcm
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from raypipe.data import open_data, token_budget
from raypipe.data.sample_order import Split, sample_keys
from raypipe.errors import RaypipeError, TransportError
from raypipe.job.spec import JobSpec
from raypipe.models import DTYPES, LayeredModel, Lengths, Task
from raypipe.models.current_slice import own_chunks
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.stage import StageModule
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.sharding import StageKey

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
        feed.hold(own_chunks(setup.ranks["context"], context), model.chunk_lengths(context), setup.copies)
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
    budget = token_budget(job, setup.parallel.replicas, model)
    multiple = job.data.pad_to_multiple_of
    if setup.parallel.sequence_parallel:
        multiple = lcm(multiple, setup.parallel.tensor)
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
