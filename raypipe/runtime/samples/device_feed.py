"""What reads the raw inputs of one device's stages: prepared arrays on its node, or a stream of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from raypipe.data import open_data
from raypipe.data.sample_order import Split
from raypipe.models import DTYPES, Task
from raypipe.runtime.samples.stream_feed import StreamFeed
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import StageKey
from raypipe.schedule.lowering.programs import Program

Modules = Mapping[StageKey, StageModule]


def device_feed(setup: Setup, task: Task, modules: Modules, device: torch.device, reads_whole: bool) -> Feed:
    """Return what reads the raw inputs of a device's stages.

    Args:
        setup: that of the device's worker.
        task: what the model is trained to do.
        modules: the stage replicas of the device.
        device: where the samples go.
        reads_whole: see ``open_data``.
    """
    job, samples = setup.job, setup.samples_per_microbatch
    reads = {name for module in modules.values() for name in module.reads}
    if setup.samples is not None:
        own: dict[Split, set[int]] = {
            "train": _microbatches_read(setup.train.values(), modules, setup.microbatches, setup.slices),
            "val": _microbatches_read([setup.evaluate], modules, setup.microbatches, setup.slices),
        }
        return StreamFeed(setup.samples, job, task, reads, samples, device, own, setup.left_out)
    data = open_data(setup.data, task, job.data.pad_to_multiple_of, reads, reads_whole)
    return Feed(
        data, task, reads, job.train.seed, job.train.batch, samples, device, DTYPES[job.train.dtype], setup.left_out
    )


def _microbatches_read(programs: Iterable[Program], modules: Modules, microbatches: int, slices: int) -> set[int]:
    """Return the micro-batches of which programs read raw inputs."""
    tasks = [action.task for program in programs for action in program.actions]
    held = [task for task in tasks if (task.stage, task.replica) in modules]
    reading = [task for task in held if modules[task.stage, task.replica].reads]
    return {mb % microbatches // slices for task in reading for mb in task.mbs}
