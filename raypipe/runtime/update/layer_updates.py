"""Updates layer by layer, without a barrier: each is made when its sum is in, before the next step reads the layer.

At its U task, a stage replica's gradients are put aside. A block of the next step's first forward waits for the sums of
its own parameters alone, which are updated then; sums of later blocks may still be under way. What no forward has asked
for is updated at the end of it, or before anything else reads the weights (``commit``). There is no global
gradient norm before all sums are in, so nothing can be clipped.

Source: Peng et al. 2019 (ByteScheduler), section 3: crossing the global barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raypipe.runtime.clocks.clock import HostClock, Mark
from raypipe.runtime.update.gradients import StageKey, TieSum
from raypipe.runtime.update.optimizer import set_rate
from raypipe.runtime.update.policy import Trained, WeightUpdates
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


class LayerUpdates(WeightUpdates):
    """Makes the updates of one device's stage replicas, whose gradients ``PrioritisedAllReduce`` sums."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self._open: dict[StageKey, Deferred] = {}
        self._late: dict[int, LateResult] = {}
        self._ties: list[TieSum] = []
        self._hooks: list[RemovableHandle] = []
        self._reads: dict[tuple[StageKey, int], list[nn.Parameter]] = {}
        for key, module in self.modules.items():
            own = {id(p): p for p in module.trained.values()}
            for number, block in enumerate(module.body.blocks):
                self._reads[key, number] = [own[id(p)] for p in block.parameters() if id(p) in own]
                # Each block waits for its own part, and so no forward for all of its stage.
                self._hooks.append(block.register_forward_pre_hook(partial(self._before, key, number)))

    def sum(self, key: StageKey) -> None:
        """See WeightUpdates.sum."""
        self.after_forward(key)
        super().sum(key)

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Start to sum the parameters that several stages hold; all other sums of the step have been started."""
        self._ties = self.sync.start_ties()

    def update(self, key: StageKey) -> None:
        """Put the step's gradients of a stage replica aside, to be applied with the step's learning rate."""
        self.after_forward(key)
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
        self._open[key] = Deferred(self.step, self.lr, dict(enumerate(parts)), of)
        self._late.setdefault(self.step, LateResult())
        if alone:
            self._update(key, len(parts) - 1)

    def after_forward(self, key: StageKey) -> None:
        """Make what is left of a stage replica's update; does nothing if nothing is."""
        deferred = self._open.get(key)
        if deferred is None:
            return
        for number in list(deferred.parts):
            self._update(key, number)
        del self._open[key]
        at = self.sync.settle(key, self.push, self.clock)
        if at is not None:
            self._late[deferred.step].summed[key] = at
        self.sync.drop(key)
        self.move_statistics(key, deferred.step)

    def commit(self, wait: bool = True) -> bool:
        """Make what is left of all updates; they stand."""
        for key in list(self._open):
            self.after_forward(key)
        return True

    def close(self) -> None:
        """See WeightUpdates.close."""
        for hook in self._hooks:
            hook.remove()
        self._open.clear()
        self._late.clear()

    def report(self, step: int, program: Program) -> Callable[[NDArray[np.float64]], float]:
        """See WeightUpdates.report; the ends of sums are set where the host's clock can say them."""

        def complete(times: NDArray[np.float64]) -> float:
            for key, deferred in list(self._open.items()):
                if deferred.step <= step:
                    self.after_forward(key)
            late = self._late.pop(step, LateResult())
            if isinstance(self.clock, HostClock):
                self.mark_sums(program, times, late.summed)
            return float(torch.stack(late.squares).sum()) if late.squares else 0.0

        return complete

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
        summed.take(number, self.push)

    def _take_tie(self, tie: TieSum, held: Sequence[nn.Parameter]) -> None:
        total = tie.wait(self.push)
        for p in held:
            p.grad = total.clone()


def _set(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
