"""The worker of a session: its stages run the micro-batches that a call brings, and update when a call says so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data.sample_order import Split
from raypipe.models import DTYPES, Inputs, LayeredModel, Lengths
from raypipe.runtime.executor.runner import Handler
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.recovery.replacement import parts_when_lost
from raypipe.runtime.session.call_data import PADDING, CallData, Key
from raypipe.runtime.session.slots import Adapters, Slots, read, write
from raypipe.runtime.session.token_losses import ROW, TOKENS, CallTask, Options
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.update.updates import Updates
from raypipe.runtime.worker.worker import StageWorker
from raypipe.schedule.kinds import COMPUTE
from raypipe.schedule.lowering.programs import Action, Program

MOST_MICROBATCHES = 1 << 20
"""Micro-batch ids between one call's first and the next call's, where a run has its step's number of them."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """The numbers of one update; the defaults are those of Tinker's ``AdamParams``."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest global norm of the gradients; None to clip nothing."""


class CallPart(NamedTuple):
    """One device's report of a call."""

    loss_sums: tuple[float, ...]
    """Of each of the calls that ran together."""
    logprobs: Mapping[int, NDArray[Any]]
    """By the number of a sequence over all of the calls: ``[padded length]``."""


class CallOn(NamedTuple):
    """Weights and loss of a call's micro-batches."""

    slot: int
    """The weights."""
    loss: str
    options: Options


class WorkerUpdate(NamedTuple):
    """One device's report of an update, and of the time since the update before it, of whatever slot."""

    norm_squared: float
    """Its share of the squared global norm of the gradients, before clipping."""
    seconds: float
    """Since the device's last update, or its set-up."""
    called_s: float
    """Of these, with a call running."""
    computed_s: float
    """Of these, in compute tasks (F, B, W, BW, R)."""


class CallFeed(Feed):
    """Gives the stages of a device the raw inputs of the call that runs."""

    def __init__(self, samples: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(None, CallTask(), (), 0, 0, samples, device, dtype)
        self._call = CallData({}, (), ())

    def begin(self, call: CallData) -> None:
        """Take the data of the next call."""
        self._call = call

    def prefetch(self, split: Split, step: int) -> None:
        """Do nothing: what the next call is, is not known here."""

    def _lengths_of(self, split: Split, step: int, mb: int) -> Lengths:
        return {TOKENS: self._call.lengths[mb]}

    def inputs(self, split: Split, step: int, mb: int) -> Inputs:
        """See ``Feed.inputs``."""
        call, rows = self._call, self._rows_of(split, mb)
        names = call.names[call.calls[mb]]
        return {name: self._tensor(name, call.rows[name][rows], call.lengths[mb]) for name in sorted(names)}

    def _tensor(self, name: str, values: NDArray[Any], length: int) -> Tensor:
        if name == ROW:  # read on the host
            return torch.from_numpy(values.copy())
        return torch.from_numpy(np.ascontiguousarray(values[:, :length]).copy()).to(self.device)

    def targets(self, split: Split, step: int) -> int:
        """Return 1: the loss of a call is a sum, and not a mean over its targets."""
        return 1


class StageSession(StageWorker):
    """The process of one rank in a session; the driver calls the same methods in the same order on every one."""

    def _model(self, setup: Setup) -> LayeredModel:
        """See ``StageWorker._model``; the loss is the call's."""
        model = super()._model(setup)
        self.task = model.task = CallTask()
        return model

    def _feed(self, setup: Setup, model: LayeredModel) -> Feed:
        """See ``StageWorker._feed``."""
        self.feed = CallFeed(setup.samples_per_microbatch, self.device, DTYPES[setup.job.train.dtype])
        return self.feed

    def setup(self, setup: Setup) -> tuple[int, list[str]]:
        """See ``StageWorker.setup``."""
        self.programs: dict[Key, Program] = {}
        self.calls: Sequence[CallOn] = ()
        """Those that run now."""
        self.of_microbatch: tuple[int, ...] = ()
        held = super().setup(replace(setup, microbatches=MOST_MICROBATCHES))
        self.slots = Slots(self.modules, self.optimizers, self.executor)
        self.executor.surround(self._for_its_call)
        self._since, self._called_s, self._computed_s = time.monotonic(), 0.0, 0.0
        return held

    def learn(self, key: Key, program: Program) -> None:
        """Keep the program of calls with so many micro-batches."""
        self.programs[key] = program

    def forget(self, key: Key) -> None:
        """Drop a program."""
        del self.programs[key]

    def _for_its_call(self, handler: Handler) -> Handler:
        """Surround a handler of tasks: each runs on the weights, and with the loss, of its micro-batch's call."""

        def handle(executor: Any, action: Action) -> None:
            if self.calls and action.task.kind in COMPUTE:
                call = self.of_microbatch[action.task.mbs[0]]
                self.slots.use(self.calls[call].slot)
                self.task.use(call)
            handler(executor, action)

        return handle

    @parts_when_lost
    def run_calls(self, calls: Sequence[CallOn], number: int, key: Key, data: CallData) -> CallPart:
        """Run the micro-batches of calls; with ``key.kind`` backward, their gradients add to those of earlier calls.

        Args:
            calls: the weights and the loss of each.
            number: of the run in its session.
            key: names the program.
            data: the data of all.
        """
        self.calls, self.of_microbatch = calls, data.calls
        self.feed.begin(data)
        self.task.begin([(one.loss, one.options) for one in calls])
        try:
            self._run(key, number, 0.0, "train" if key.kind == "backward" else "val")
        finally:
            self.calls = ()
        logprobs, sums = self.task.take()
        kept = {row: values.cpu().numpy() for row, values in logprobs.items() if row != PADDING}
        return CallPart(sums, kept)

    @parts_when_lost
    def update(self, slot: int, number: int, key: Key, adam: AdamW) -> WorkerUpdate:
        """Sum the gradients since the last update, clip them and update."""
        self.slots.use(slot)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                decays = group.setdefault("decays", group["weight_decay"] > 0)
                given = {"betas": adam.betas, "eps": adam.eps, "weight_decay": adam.weight_decay if decays else 0.0}
                group.update(given)
        updates = self.executor.updates
        assert isinstance(updates, Updates)
        updates.limit = adam.clip
        norm_squared = self._run(key, number, adam.lr).norm_squared
        began, self._since = self._since, time.monotonic()
        part = WorkerUpdate(norm_squared, self._since - began, self._called_s, self._computed_s)
        self._called_s = self._computed_s = 0.0
        return part

    def _run(self, key: Key, number: int, rate: float, split: Split = "train") -> StepResult:
        """Run a program, and count its time."""
        began, program = time.monotonic(), self.programs[key]
        result = self.executor.run(program, number, rate, split)
        computes = [action.task.kind in COMPUTE for action in program.actions]
        self._computed_s += float((result.times[:, 1] - result.times[:, 0]) @ np.array(computes, float))
        self._called_s += time.monotonic() - began
        return result

    @parts_when_lost
    def free(self, slot: int) -> None:
        """Give up what a slot has."""
        self.slots.free(slot)

    @parts_when_lost
    def write_weights(self, slot: int, folder: Path) -> None:
        """Write the weights that this device is the first to hold, and their optimizer's state, into a folder."""
        self.slots.use(slot)
        first = [key for key in self.modules if key[1] == 0]
        write(folder, self.rank, [(self.modules[key].trained, self.optimizers[key]) for key in first])

    @parts_when_lost
    def read_weights(self, slot: int, folder: Path, with_optimizer: bool, adapters: Adapters | None = None) -> None:
        """Read weights, and with them the optimizer's state or none; gradients since the last update are dropped.

        ``adapters``: see ``slots.read``.

        Raises:
            CheckpointError: they are those of another model.
        """
        self.slots.use(slot)
        read(folder, [(m.trained, self.optimizers[key]) for key, m in self.modules.items()], with_optimizer, adapters)
        for key in self.modules:
            self.executor.sync.drop(key)
        self.executor.casts.drop()
