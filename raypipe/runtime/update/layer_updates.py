"""Updates layer by layer, without a barrier: each is made when its sum is in, before the next step reads the layer.

At its U task, a stage replica's gradients are put aside. A block of the next step's first forward waits for the sums of
its own parameters alone, which are updated then; sums of later blocks may still be under way. What no forward has asked
for is updated at the end of it, or before anything else reads the weights (``complete_all``). There is no global
gradient norm before all sums are in, so nothing can be clipped.

Source: Peng et al. 2019 (ByteScheduler), section 3: crossing the global barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raypipe.runtime.clocks.clock import Clock, HostClock, Mark
from raypipe.runtime.stage.stage import MicrobatchState, StageModule
from raypipe.runtime.update.collective import Push
from raypipe.runtime.update.gradients import GradientSync, StageKey, TieSum
from raypipe.runtime.update.optimizer import set_rate
from raypipe.schedule.lowering.programs import Program


@dataclass(slots=True)
class UpdatePart:
    """Parameters of one stage replica that are updated together."""

    parameters: Sequence[nn.Parameter]
    take: Callable[[], None]
    """Waits for the sum of their gradients and sets these."""


@dataclass(slots=True)
class Deferred:
    """The update of one stage replica that is being made."""

    step: int
    lr: float
    parts: dict[int, UpdatePart]
    """Those still to be made."""
    of_parameter: dict[nn.Parameter, int]


@dataclass(slots=True)
class LateResult:
    """Results of a step that are known only when its updates have been made."""

    squares: list[Tensor] = field(default_factory=list)
    """This device's share of the squared global gradient norm, in parts."""
    summed: dict[StageKey, Mark] = field(default_factory=dict)
    """When each all-reduce was complete."""


class LayerUpdates:
    """Makes the updates of one device's stage replicas.

    Args:
        modules: the stage replicas.
        optimizers: theirs.
        sync: sums their gradients, by ``PrioritisedAllReduce``.
        push: moves this device's own messages on.
        clock: the device's.
        updated: called with a stage replica, and the number of the step, when all of it has been updated.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, StageModule],
        optimizers: Mapping[StageKey, torch.optim.Optimizer],
        sync: GradientSync,
        push: Push,
        clock: Clock,
        updated: Callable[[StageKey, int], None],
    ) -> None:
        self.modules, self.optimizers, self.sync = modules, optimizers, sync
        self._push, self._clock, self._updated = push, clock, updated
        self._open: dict[StageKey, Deferred] = {}
        self._late: dict[int, LateResult] = {}
        self._ties: list[TieSum] = []
        self._hooks: list[RemovableHandle] = []
        self._reads: dict[tuple[StageKey, int], list[nn.Parameter]] = {}
        for key, module in modules.items():
            trained = {id(p): p for p in module.trained.values()}
            for number, block in enumerate(module.body.blocks):
                self._reads[key, number] = [trained[id(p)] for p in block.parameters() if id(p) in trained]
                hook = block.register_forward_pre_hook(partial(self._before, key, number))
                self._hooks.append(hook)

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """See LateUpdates.begin_step."""

    def before_forward(self, key: StageKey) -> None:
        """See LateUpdates.before_forward: each block waits for its own part (``_before``)."""

    def before_backward(self, key: StageKey) -> None:
        """See LateUpdates.before_backward."""

    def takes(self, key: StageKey, saved: MicrobatchState) -> bool:
        """See LateUpdates.takes: the executor computes them."""
        return False

    def begin(self) -> None:
        """All sums of this device's step have been started: start those of parameters that several stages hold."""
        self._ties = self.sync.start_ties()

    def defer(self, key: StageKey, step: int, lr: float) -> None:
        """Put the gradients of a stage replica aside; they are those of ``step``, to be applied with ``lr``."""
        self.complete(key)
        parts: list[UpdatePart] = []
        summed = self.sync.prioritised(key)
        if summed is not None:
            for number, bucket in enumerate(summed.buckets):
                parts.append(UpdatePart(bucket.parameters, partial(self._take_bucket, key, number)))
        own = {id(p) for p in self.modules[key].trained.values()}
        for tie in self._ties:
            held = [p for p in tie.copies if id(p) in own]
            if held:
                parts.append(UpdatePart(held, partial(self._take_tie, tie, held)))
        covered = {id(p) for part in parts for p in part.parameters}
        alone = [p for p in self.modules[key].trained.values() if id(p) not in covered]
        if alone:
            gradients = [p.grad for p in alone]
            parts.append(UpdatePart(alone, partial(_set, alone, gradients)))
        for p in self.modules[key].trained.values():
            p.grad = None
        of = {p: number for number, part in enumerate(parts) for p in part.parameters}
        self._open[key] = Deferred(step, lr, dict(enumerate(parts)), of)
        self._late.setdefault(step, LateResult())
        if alone:
            self._update(key, len(parts) - 1)

    def complete(self, key: StageKey) -> None:
        """Make what is left of a stage replica's update; does nothing if nothing is."""
        deferred = self._open.get(key)
        if deferred is None:
            return
        for number in list(deferred.parts):
            self._update(key, number)
        del self._open[key]
        at = self.sync.settle(key, self._push, self._clock)
        if at is not None:
            self._late[deferred.step].summed[key] = at
        self.sync.drop(key)
        self._updated(key, deferred.step)

    def complete_all(self) -> None:
        """Make what is left of all updates."""
        for key in list(self._open):
            self.complete(key)

    def close(self) -> None:
        """Give up what is left of the updates, and everything that this refers to.

        A worker's objects are not looked through for reference cycles (``gc.freeze``), so none may be left behind:
        with it, the process groups of the plan before would live on.
        """
        for hook in self._hooks:
            hook.remove()
        self._open.clear()
        self._late.clear()

    def report(self, step: int, program: Program, times: NDArray[np.float64]) -> float:
        """Return this device's share of a step's squared gradient norm; its updates are completed for that.

        ``times`` (``[tasks, 2]``, of the step's program) gets the ends of all-reduces, where the host's clock can say.
        """
        for key, deferred in list(self._open.items()):
            if deferred.step <= step:
                self.complete(key)
        late = self._late.pop(step, LateResult())
        if isinstance(self._clock, HostClock):
            for i, action in enumerate(program.actions):
                task = action.task
                if task.kind == "AR" and (task.stage, task.replica) in late.summed:
                    times[i, 1] = late.summed[task.stage, task.replica]
        return float(torch.stack(late.squares).sum()) if late.squares else 0.0

    def _before(self, key: StageKey, block: int, *_call: object) -> None:
        deferred = self._open.get(key)
        if deferred is None:
            return
        for p in self._reads[key, block]:
            number = deferred.of_parameter[p]
            if number in deferred.parts:
                self._update(key, number)

    def _update(self, key: StageKey, number: int) -> None:
        deferred = self._open[key]
        part = deferred.parts.pop(number)
        part.take()
        self._late[deferred.step].squares.append(self.sync.norm_squared(part.parameters))
        optimizer = self.optimizers[key]
        set_rate(optimizer, deferred.lr)
        optimizer.step()  # of the parameters that have a gradient: this part's
        for p in part.parameters:
            p.grad = None

    def _take_bucket(self, key: StageKey, number: int) -> None:
        summed = self.sync.prioritised(key)
        assert summed is not None
        summed.take(number, self._push)

    def _take_tie(self, tie: TieSum, held: Sequence[nn.Parameter]) -> None:
        total = tie.wait(self._push)
        for p in held:
            p.grad = total.clone()


def _set(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
