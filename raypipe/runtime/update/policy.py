"""Update policies: when gradients are summed, when an update is made, when it is final.

The executor asks its policy at fixed moments of a step, and knows nothing else of updates. ``updates`` has those behind
a barrier between steps and PipeDream's; ``late_updates`` has those that go without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from raypipe.models.host_copies import to_host
from raypipe.models.running_statistics import move_all, part_of_step
from raypipe.runtime.process.clock import Clock, Mark
from raypipe.runtime.stage.stage import MicrobatchState, StageModule
from raypipe.runtime.update.buckets import BucketedAllReduce
from raypipe.runtime.update.collectives import Push
from raypipe.runtime.update.gradients import GradientSync
from raypipe.runtime.update.ledger import Ledger
from raypipe.runtime.update.optimizer import set_rate
from raypipe.runtime.update.weight_versions import Snapshot
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.sharding import StageKey


class UpdatePolicy:
    """All that a runner asks about updates, in the order of a step. This one has none to make."""

    pending = False
    """Whether the last updates may still be taken back, or have yet to be made: see ``commit``."""

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """Note that a training step begins, whose updates have the learning rate ``lr``."""

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Wait for what other devices contribute to the updates. Called before the first U, outside of any task.

        ``times`` (``[tasks, 2]``) holds marks of the runner's clock, and may be changed.

        Raises:
            TransportError: a device did not join in time.
        """

    def commit(self, wait: bool = True) -> bool | None:
        """Make the last updates final. Call it before anything but the next step reads weights or optimizer state.

        Returns:
            True if they stand; False if they were undone and made again, so that all tasks since ran on wrong weights;
            None, with nothing done, if that is not known yet and ``wait`` is False.

        Raises:
            TransportError: a device did not hand in its share of the norm in time.
        """
        return True

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of all process groups and of what is under way on them, for good; return them."""
        return []


Report = Callable[[NDArray[np.float64]], float]
"""Waits for the updates of a step, sets in its times when its sums ended, if that was not known before, and returns
this device's share of its squared norm."""


@dataclass(frozen=True, slots=True)
class Trained:
    """All that the updates of one device are about."""

    modules: Mapping[StageKey, StageModule]
    optimizers: Mapping[StageKey, torch.optim.Optimizer]
    sync: GradientSync
    """Has the gradients."""
    microbatches: int
    """Of a step."""
    push: Push
    """Moves this device's own messages on."""
    clock: Clock
    weights_change: Callable[[], None]
    """Called when an update changes weights of which casts may be kept."""


class WeightUpdates(UpdatePolicy):
    """A policy about the weights of a device's stage replicas; methods name a replica by its key.

    Here are the parts that most of them share: gradients accumulate where they are summed, and every AR starts a sum.
    """

    optimistic = False
    """Whether the newest updates were made before their norm was known."""
    each_microbatch = False
    """Whether every micro-batch is a mini-batch of its own."""

    def __init__(self, trained: Trained) -> None:
        self.modules, self.optimizers, self.sync = trained.modules, trained.optimizers, trained.sync
        self.microbatches, self.push, self.clock = trained.microbatches, trained.push, trained.clock
        self.weights_change = trained.weights_change
        self.step = -1
        self.squares: list[Tensor] = []
        """This device's share of the squared norm of each of the step's updates, as far as it is known."""
        self.sums_wait_s = 0.0
        """Seconds that the host waited for the step's sums."""
        self.ledger: Ledger | None = None
        """What the devices tell one another of each step, where one that dies is replaced in place."""

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """See UpdatePolicy.begin_step."""
        self.program, self.step, self.lr = program, step, lr
        self.squares, self.sums_wait_s = [], 0.0
        self.sync.begin_step((a.task.stage, a.task.replica) for a in program.actions if a.task.kind == "AR")

    def weights(self, key: StageKey, ahead: bool) -> Snapshot | None:
        """Return the weights that a forward runs on; None for the module's own.

        ``ahead``: it belongs to the next step.
        """
        return None

    def before_forward(self, key: StageKey) -> None:
        """Note that a forward is to run next; what it reads must be updated by then."""

    def after_forward(self, key: StageKey) -> None:
        """Note that a forward has been issued; whatever it did not ask for may be updated now."""

    def before_backward(self, key: StageKey) -> None:
        """Note that a backward is to run next, which may add to gradients."""

    def open(self, key: StageKey) -> None:
        """Let gradients accumulate where they will be summed.

        Raises:
            TransportError: another copy did not join an earlier sum in time.
        """
        self.sync.open(key, self.push)

    def early(self, key: StageKey) -> BucketedAllReduce | None:
        """Return the sum whose buckets may start while the last gradients are computed, if there is one."""
        return self.sync.early(key)

    def weight_gradients(self, key: StageKey, saved: MicrobatchState, compute: Callable[[], None]) -> None:
        """Carry out the deferred weight gradients of a micro-batch: ``compute`` does so."""
        compute()

    def sum(self, key: StageKey) -> None:
        """Carry out an AR: start to sum a replica's gradients over its holders."""
        self.sync.launch(key, self.seen_statistics(key, self.step))

    def update(self, key: StageKey) -> None:
        """Carry out a U."""
        raise NotImplementedError

    def step_optimizer(self, key: StageKey, lr: float, of: Iterable[nn.Parameter] | None = None) -> Tensor:
        """Update the parameters of a replica that have a gradient, where that waits for no norm.

        Returns this device's share of the squared norm of the parameters ``of``; None for all.
        """
        squares = self.sync.norm_squared(of)
        set_rate(self.optimizers[key], lr)
        self.optimizers[key].step()
        return squares

    def report(self, step: int, program: Program) -> Report:
        """Return what completes a step's updates, where some are made later, and returns what is known of its norm."""
        squares = to_host(torch.stack(self.squares)) if self.squares else torch.zeros(1)
        return lambda times: float(squares.mean())  # of several updates in a step (PipeDream)

    def leave(self) -> list[dist.ProcessGroup]:
        """See UpdatePolicy.leave."""
        self.push = lambda: False
        return self.sync.leave()

    def close(self) -> None:
        """Give up what is left of the updates, and everything that this refers to.

        A worker's objects are not looked through for reference cycles (``gc.freeze``), so none may be left behind:
        with it, the process groups of the plan before would live on.
        """

    def mark_sums(self, program: Program, times: NDArray[np.float64], ends: Mapping[StageKey, Mark]) -> None:
        """Let each AR end when its sum was complete, not when it was launched."""
        for i, action in enumerate(program.actions):
            if action.task.kind == "AR" and (end := ends.get((action.task.stage, action.task.replica))) is not None:
                times[i, 1] = end

    def seen_statistics(self, key: StageKey, step: int) -> Tensor | None:
        """Return a replica's share of a step's batch statistics (``running_statistics``); None without any."""
        statistics = self.modules[key].statistics
        return part_of_step(statistics, step, self.microbatches) if statistics else None

    def move_statistics(self, key: StageKey, step: int) -> None:
        """Move a replica's running statistics on; called when the step's forwards are final in all replicas."""
        total = self.sync.totals.pop(key, None)
        if total is None:
            total = self.seen_statistics(key, step)
        if total is not None:
            move_all(self.modules[key].statistics, total, step, self.microbatches)
