"""torch's profiler over a few steps of every worker (``train.profile``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from raypipe.job.train_spec import ProfileSpec
from raypipe.runtime.executor.runner import Handler
from raypipe.schedule.lowering.programs import Action

FOLDER = "profiles"
"""Folder of the run's directory that gets a trace per worker."""


class ProfilerWindow:
    """Profiles a worker's steps ``start_step`` to ``start_step + steps - 1`` and writes a Chrome trace.

    Every task of the schedule is a span of the trace, by its name, such as ``1F0``.

    Args:
        spec: which steps; None for none.
        folder: the run's folder of traces.
        rank: the worker's.
        device: its device.
    """

    def __init__(self, spec: ProfileSpec | None, folder: Path, rank: int, device: torch.device) -> None:
        self._spec, self._folder, self._rank, self._device = spec, folder, rank, device
        self._profiler: Any = None

    def begin(self, step: int, executor: Any) -> None:
        """Start where ``step``, counted from 1, is in the window and nothing is profiled yet."""
        spec = self._spec
        if spec is None or self._profiler is not None or not 0 <= step - spec.start_step < spec.steps:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._first = step
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._plain = executor.handlers
        executor.surround(_named)

    def end(self, step: int, executor: Any) -> None:
        """Stop, and write the trace, where ``step`` is the last of the window."""
        if self._profiler is None or self._spec is None or step < self._spec.start_step + self._spec.steps - 1:
            return
        profiler, self._profiler = self._profiler, None
        executor.handlers = self._plain
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"steps-{self._first}-{step}-rank-{self._rank}.json.gz"))


def _named(handler: Handler) -> Handler:
    def run(executor: Any, action: Action) -> None:
        with record_function(str(action.task)):
            handler(executor, action)

    return run
