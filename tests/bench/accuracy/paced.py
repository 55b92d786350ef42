"""Stage actors that compute a small model for real, but at a set pace: real driver, programs, messages and losses, on a
machine whose every speed is known and may change between two steps.

A task lasts as long as the pace says, computed or not; a message is held back until its link would have delivered it; a
gradient sum lasts from the moment its last holder joins, one after another on each device. Unlike emulated devices
(``raypipe.runtime.emulation.emulated_worker``) these train: what a swap of programs does to losses and checkpoints
shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.runtime.emulation.emulated_worker import wait_until
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.runner import Handler
from raypipe.runtime.process.clock import Clock, Mark
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.runtime.update.collectives import Push, wait_for
from raypipe.runtime.update.gradients import GradientSync
from raypipe.runtime.worker.worker import StageWorker
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Task
from raypipe.schedule.lowering.programs import Action, Message, Program
from raypipe.schedule.sharding import StageKey

STAMP = TensorSpec((1,), torch.float64)
"""Travels with each message: when the link delivers it, on this host's monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the machine is, from one step on."""

    costs: CostTable
    """Seconds; ``recompute`` is of a stage's every layer, ``all_reduce`` of one sum."""
    first_step: int = 0
    slower: dict[int, float] = field(default_factory=dict)
    """Rank -> factor of all its tasks' times."""
    noise: float = 0.0
    """Standard deviation of the logarithm of each task's time."""


class PacedExecutor(Executor):
    """Tasks and messages take at least the set times."""

    pace_of: Callable[[int], Pace]
    rank = 0
    size = 1.0
    """Share of a micro-batch that one id stands for."""
    recomputed_share: Callable[[int], float]
    """Stage -> the share of its layers that an R computes."""

    def start(self, program: Program, *args: Any, **kwargs: Any) -> Any:
        """See Executor.start."""
        self._free_at: dict[int, float] = {}
        return super().start(program, *args, **kwargs)

    @property
    def pace(self) -> Pace:
        """Of this step."""
        return self.pace_of(self.step)

    def seconds(self, task: Task) -> float:
        """How long a task takes."""
        pace = self.pace
        time_s = pace.costs.by_kind(task.kind)[task.stage] * (len(task.mbs) * self.size if task.mbs else 1.0)
        if task.kind == "R":
            time_s *= self.recomputed_share(task.stage)
        time_s *= pace.slower.get(self.rank, 1.0)
        if pace.noise:
            time_s *= float(np.exp(self._random.normal(0.0, pace.noise)))
        return time_s

    def _specs(self, message: Message) -> tuple[TensorSpec, ...]:
        return (*super()._specs(message), STAMP)

    def send(self, m: Message) -> None:
        """See ProgramRunner.send."""
        key = (m.direction, m.src_stage, m.dst_stage, self.base + m.mb)
        lag = self.pace.costs.latency(m.src_stage, m.dst_stage) if self.training else 0.0
        self.p2p_buffers[key] = (*self.p2p_buffers[key], torch.tensor([time.monotonic() + lag], dtype=torch.float64))
        super().send(m)

    def receive(self, m: Message, action: Action) -> None:
        """See ProgramRunner.receive."""
        super().receive(m, action)
        key = (m.direction, m.src_stage, m.dst_stage, self.base + m.mb)
        *payload, delivered = self.p2p_buffers[key]
        self.p2p_buffers[key] = tuple(payload)
        wait_until(float(delivered))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = np.random.default_rng()
        self.surround(_paced)


def _paced(handler: Handler) -> Handler:
    def run(executor: PacedExecutor, action: Action) -> None:
        begin = time.monotonic()
        handler(executor, action)
        if executor.training and action.task.kind != "AR":
            wait_until(begin + executor.seconds(action.task))

    return run


class PacedSync(GradientSync):
    """Gradient sums that take at least the set time. All holders of a stage must hold the same stages."""

    seconds: Callable[[int], float]

    def launch(self, key: StageKey, beside: Tensor | None = None) -> None:
        """See GradientSync.launch."""
        before = self._pending.keys() | set()
        super().launch(key, beside)
        if key in self._pending.keys() - before:
            joined = torch.tensor([time.monotonic()], dtype=torch.float64)
            work = dist.all_reduce(joined, dist.ReduceOp.MAX, group=self.groups[f"stage {key[0]}"], async_op=True)
            self.__dict__.setdefault("_joined", []).append((key, work, joined))

    def finish(self, push: Push, clock: Clock) -> dict[StageKey, Mark]:
        """See GradientSync.finish."""
        free, ends = 0.0, {}
        for key, work, joined in self.__dict__.pop("_joined", []):
            wait_for(f"pace of stage {key[0]}", work, push)
            free = ends[key] = max(free, float(joined)) + self.seconds(key[0])
        completed = super().finish(push, clock)
        for end in ends.values():
            wait_until(end)
        return {**completed, **ends}


class PacedStage(StageWorker):
    """One device that computes at a set pace."""

    executor_class = PacedExecutor
    sync_class = PacedSync

    def set_pace(self, paces: Sequence[Pace], size: float) -> None:
        """From the next setup on. ``paces`` ascend by their first step."""
        self.paces, self.size = list(paces), size

    def setup(self, setup: Setup) -> tuple[int, list[str]]:
        """See Stage.setup."""
        result = super().setup(setup)
        executor = self.executor
        assert isinstance(executor, PacedExecutor)
        assert isinstance(executor.sync, PacedSync)
        executor.rank, executor.size = self.rank, self.size
        executor.pace_of = lambda step: [p for p in self.paces if p.first_step <= step][-1]
        executor.sync.seconds = lambda stage: executor.pace.costs.all_reduce[stage]
        self._set_share(setup.recomputed)
        return result

    def install(self, train: Any, evaluate: Program, recomputed: frozenset[int] | None, measures: bool) -> None:
        """See Stage.install."""
        super().install(train, evaluate, recomputed, measures)
        if self.setup_data.search_recompute:
            self._set_share(recomputed)

    def _set_share(self, recomputed: frozenset[int] | None) -> None:
        cut = self.setup_data.cut
        assert isinstance(self.executor, PacedExecutor)
        self.executor.recomputed_share = lambda stage: (
            1.0 if recomputed is None else len(recomputed & set(cut[stage])) / len(cut[stage])
        )
