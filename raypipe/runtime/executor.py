"""The executor: runs one device's program of a step, task by task, and records when each task ran.

Hot path: everything that can be decided before the step is decided before it (labels, what is posted, which
replica), so that between two tasks there is only the message and a few dictionary look-ups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data.corpus import Split
from raypipe.models.keyed_random import random_keys
from raypipe.runtime.gradients import GradientSync, StageKey
from raypipe.runtime.stage import Live, Loss, Payload, StageModule
from raypipe.runtime.transport.channel import Expected, Label, Receiver, Sender, TensorSpec
from raypipe.schedule.messages import Action, Message, Program

Feed = Callable[[Split, int, int], tuple[Tensor, Tensor]]
"""``(split, step, micro-batch id) -> (tokens, targets)``, both on the stage's device."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a device reports of one step; small, since it travels through Ray."""

    loss_sum: float
    """Sum of the token losses of the micro-batches whose last stage is here, over the tokens of the mini-batch."""
    norm_squared: float
    """This device's share of the squared gradient norm (all of it, already rooted, when clipping: see ``norm``)."""
    norm: float | None
    """Global gradient norm before clipping, where clipping computed it."""
    times: NDArray[np.float64]
    """``[tasks, 2]`` start and end of every task, on this host's monotonic clock in seconds."""
    received: int
    """Messages that came from other devices."""
    all_reduces: float
    """Gradient all-reduces; each of a group's members counts its share of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What stays the same over all steps of a run."""

    seed: int
    samples_per_microbatch: int
    tokens_per_batch: int
    """Tokens of a mini-batch: what every token loss is divided by."""
    clip: float | None
    timeout_s: float
    autocast: torch.dtype | None
    device: torch.device


class Executor:
    """Owns the stage replicas of one device and runs programs over them."""

    def __init__(
        self,
        settings: StepSettings,
        modules: Mapping[StageKey, StageModule],
        optimizers: Mapping[StageKey, torch.optim.Optimizer],
        loss: Loss,
        feed: Feed,
        sync: GradientSync | None,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        wire: Mapping[int, tuple[TensorSpec, ...]],
    ) -> None:
        self.settings = settings
        self.modules = modules
        self.optimizers = optimizers
        self.loss = loss
        self.feed = feed
        self.sync = sync
        self.senders = senders
        self.receivers = receivers
        self.wire = wire
        self._scale = torch.tensor(1.0 / settings.tokens_per_batch, device=settings.device)
        self._live: dict[tuple[int, int], Live] = {}
        self._mail: dict[tuple[str, int, int, int], Payload] = {}
        self._fed: dict[int, tuple[Tensor, Tensor]] = {}
        self._losses: list[Tensor] = []

    def run(self, program: Program, step: int, lr: float, split: Split = "train") -> StepResult:
        """Run one step (``split="train"``) or one forward-only evaluation batch (``split="val"``).

        Raises:
            TransportError: a message did not come in time; names task, peer and micro-batch.
        """
        self._begin(program, step, lr, split)
        times = np.empty((len(program.actions), 2))
        clock = time.monotonic
        received = 0
        grad_mode = torch.enable_grad() if self.training else torch.no_grad()
        with grad_mode:
            for i, action in enumerate(program.actions):
                for message in action.receives:
                    if message.src_device != message.dst_device:
                        self._receive(message, action)
                        received += 1
                if action.task.kind == "U" and not self._finished:
                    self._finish_gradients(program, times)  # waiting for others is not part of any task
                times[i, 0] = clock()
                self._run_task(action)
                times[i, 1] = clock()
                for message in action.sends:
                    if message.src_device != message.dst_device:
                        self._send(message)
        for sender in self.senders.values():
            sender.flush(self.settings.timeout_s)
        return self._end(times, received)

    def _begin(self, program: Program, step: int, lr: float, split: Split) -> None:
        self.step, self.split, self.training = step, split, split == "train"
        self.lr = lr
        self._recomputed = {(a.task.stage, mb) for a in program.actions if a.task.kind == "R" for mb in a.task.mbs}
        self._finished = False
        self._norm: float | None = None
        self._norm_squared = 0.0
        for source, messages in program.arrivals.items():
            self.receivers[source].post([Expected(self._label(m), self._specs(m)) for m in messages])

    def _specs(self, message: Message) -> tuple[TensorSpec, ...]:
        # A gradient has the shape of the activation it belongs to: the output of the stage it goes to.
        producer = message.src_stage if message.direction == "act" else message.dst_stage
        return self.wire[producer]

    def _label(self, m: Message) -> Label:
        return Label(m.direction, m.src_stage, m.dst_stage, m.mb, self.step)

    def _receive(self, m: Message, action: Action) -> None:
        label = self._label(m)
        tensors = self.receivers[m.src_device].recv(label, self.settings.timeout_s)
        self._mail[(m.direction, m.src_stage, m.dst_stage, m.mb)] = tuple(tensors)

    def _send(self, m: Message) -> None:
        payload = self._mail.pop((m.direction, m.src_stage, m.dst_stage, m.mb))
        self.senders[m.dst_device].send(self._label(m), payload)

    def _run_task(self, action: Action) -> None:
        task = action.task
        kind = task.kind
        if kind == "F":
            self._forward(action)
        elif kind in ("B", "BW"):
            self._backward(action, also_weights=kind == "BW")
        elif kind == "W":
            module = self.modules[(task.stage, task.replica)]
            for mb in task.mbs:
                live = self._live.pop((task.stage, mb))
                if live.outputs:  # no B ran before it: stage 0 without an input gradient
                    module.run_backward(live, self._gradients(action, live, mb))
                module.run_weight_gradients(live)
        elif kind == "R":
            for mb in task.mbs:
                live = self._live[(task.stage, mb)]
                live.outputs = self._compute(task.stage, task.replica, mb, live.inputs)
        elif kind == "AR":
            assert self.sync is not None
            self.sync.launch((task.stage, task.replica))
        elif kind == "U":
            self._update((task.stage, task.replica))

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.autocast is None:
            return nullcontext()
        return torch.autocast(self.settings.device.type, dtype=self.settings.autocast)

    def _data(self, mb: int) -> tuple[Tensor, Tensor]:
        held = self._fed.get(mb)
        if held is None:
            held = self._fed[mb] = self.feed(self.split, self.step, mb)
        return held

    def _compute(self, stage: int, replica: int, mb: int, inputs: Payload) -> Payload:
        """Outputs of a stage for one micro-batch; of the last stage, the sum of its token losses."""
        first = mb * self.settings.samples_per_microbatch
        samples = range(first, first + self.settings.samples_per_microbatch)
        module = self.modules[(stage, replica)]
        with random_keys(self.settings.seed, self.step, samples, self.training), self._autocast():
            outputs: Payload = module(inputs)
            if stage not in self.wire:  # the last stage sends nothing on
                outputs = (self.loss(outputs[0], self._data(mb)[1]),)
        return outputs

    def _forward(self, action: Action) -> None:
        task = action.task
        stage = task.stage
        for mb in task.mbs:
            arrived = [self._mail.pop(("act", m.src_stage, stage, mb)) for m in action.receives if m.mb == mb]
            if arrived:
                inputs = tuple(t for payload in arrived for t in payload)
                if self.training:
                    for x in inputs:
                        if x.is_floating_point():
                            x.requires_grad_()
            else:
                inputs = (self._data(mb)[0],)
            again = (stage, mb) in self._recomputed
            with torch.no_grad() if again else nullcontext():
                outputs = self._compute(stage, task.replica, mb, inputs)
            if stage not in self.wire:
                self._losses.append(outputs[0].detach())
            for m in action.sends:
                if m.mb == mb:
                    self._mail[("act", stage, m.dst_stage, mb)] = tuple(y.detach() for y in outputs)
            if self.training:
                self._live[(stage, mb)] = Live(inputs, () if again else outputs)

    def _backward(self, action: Action, also_weights: bool) -> None:
        task = action.task
        stage = task.stage
        module = self.modules[(stage, task.replica)]
        for mb in task.mbs:
            live = self._live[(stage, mb)]
            back = module.run_backward(live, self._gradients(action, live, mb))
            if also_weights:
                if live.closures:
                    module.run_weight_gradients(live)
                del self._live[(stage, mb)]
            for m in action.sends:
                if m.mb == mb:
                    self._mail[("grad", stage, m.dst_stage, mb)] = back

    def _gradients(self, action: Action, live: Live, mb: int) -> tuple[Tensor, ...]:
        stage = action.task.stage
        arrived = [self._mail.pop(("grad", m.src_stage, stage, mb)) for m in action.receives if m.mb == mb]
        if not arrived:
            return (self._scale.to(live.outputs[0].dtype),)
        if len(arrived) == 1:
            return arrived[0]
        # Several stages read this output: their gradients add up.
        return tuple(torch.stack(parts).sum(0) for parts in zip(*arrived, strict=True))

    def _finish_gradients(self, program: Program, times: NDArray[np.float64]) -> None:
        self._finished = True
        assert self.sync is not None
        completed = self.sync.finish()
        for i, action in enumerate(program.actions):  # an all-reduce lasts until it is complete, beside compute
            if action.task.kind == "AR" and (action.task.stage, action.task.replica) in completed:
                times[i, 1] = completed[(action.task.stage, action.task.replica)]
        share = self.sync.norm_squared()
        self._norm_squared = float(share)
        if self.settings.clip is not None:
            self._norm = self.sync.clip(self.settings.clip, share)

    def _update(self, key: StageKey) -> None:
        optimizer = self.optimizers[key]
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _end(self, times: NDArray[np.float64], received: int) -> StepResult:
        loss = 0.0
        if self._losses:
            total = torch.stack(self._losses).double().sum()
            loss = float(total) / self.settings.tokens_per_batch
        reduced = 0.0
        if self.sync is not None:
            reduced, self.sync.all_reduces = self.sync.all_reduces, 0.0
        left = [*self._live, *self._mail]
        self._losses.clear()
        self._live.clear()
        self._mail.clear()
        self._fed.clear()
        assert not left, f"a verified program leaves nothing behind, yet {left[:3]} is left"
        return StepResult(loss, self._norm_squared, self._norm, times, received, reduced)
