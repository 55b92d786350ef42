"""Updates without a barrier between steps: layer by layer as sums come in, or on a second stream beside forwards.

There is no global gradient norm before all sums are in, so nothing can be clipped. What of a step is known late is
kept until its result is asked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raypipe.models.host_copies import to_host
from raypipe.runtime.process.clock import HostClock, Mark
from raypipe.runtime.stage.stage import MicrobatchState
from raypipe.runtime.update.gradients import TieSum
from raypipe.runtime.update.policy import Report, Trained, WeightUpdates
from raypipe.runtime.update.side_stream import Done, SideStream
from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.sharding import StageKey


@dataclass(slots=True)
class LateStep:
    """A step whose updates may not all be made."""

    number: int
    lr: float
    left: Counter[StageKey]
    """Weight-gradient tasks that have not been issued."""
    squares: list[Tensor] = field(default_factory=list)
    """This device's share of the squared gradient norm, in parts."""
    summed: dict[StageKey, Mark] = field(default_factory=dict)
    """When each all-reduce was complete."""
    total: Tensor | None = None
    """The sum of ``squares``, on its way to the host."""
    known: Done | None = None
    """When ``total`` is there."""


class LateUpdates(WeightUpdates):
    """The part that both kinds share: steps whose results are not complete."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self._steps: dict[int, LateStep] = {}
        """By number; the newest is the last."""

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """See UpdatePolicy.begin_step."""
        super().begin_step(program, step, lr)
        tasks = (a.task for a in program.actions if a.task.kind in WEIGHT_GRADIENTS)
        self._steps[step] = LateStep(step, lr, Counter((t.stage, t.replica) for t in tasks for _ in t.mbs))

    def close(self) -> None:
        """See WeightUpdates.close."""
        self._steps.clear()


# Updates layer by layer, without a barrier: each is made when its sum is in, before the next step reads the layer.
#
# At its U task, a stage replica's gradients are put aside. A block of the next step's first forward waits for the sums
# of its own parameters alone, which are updated then; sums of later blocks may still be under way. What no forward has
# asked for is updated at the end of it, or before anything else reads the weights (``commit``).
#
# Source: Peng et al. 2019 (ByteScheduler), section 3: crossing the global barrier.


@dataclass(slots=True)
class UpdatePart:
    """Parameters of one stage replica that are updated together."""

    parameters: Sequence[nn.Parameter]
    take: Callable[[], object]
    """Waits for the sum of their gradients and sets these."""


class LayerUpdates(LateUpdates):
    """Makes the updates of one device's stage replicas, whose gradients ``PrioritisedAllReduce`` sums."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self._open: dict[StageKey, tuple[LateStep, dict[nn.Parameter, UpdatePart]]] = {}
        """The updates that are being made, with the part of each parameter that has none yet."""
        self._ties: list[TieSum] = []
        self._hooks: list[RemovableHandle] = []
        for key, module in self.modules.items():
            own = set(module.trained.values())
            for block in module.body.blocks:
                read = [p for p in block.parameters() if p in own]
                # Each block waits for its own part, and so no forward for all of its stage.
                self._hooks.append(block.register_forward_pre_hook(partial(self._before, key, read)))

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
        step, trained = self._steps[self.step], list(self.modules[key].trained.values())
        summed, parts = self.sync.prioritised(key), list[UpdatePart]()
        if summed is not None:
            parts += [
                UpdatePart(one.parameters, partial(self._take_bucket, key, n)) for n, one in enumerate(summed.buckets)
            ]
        own = set(trained)
        for tie in self._ties:
            held = [p for p in tie.copies if p in own]
            parts.append(UpdatePart(held, partial(self._take_tie, tie, held)))
        left = {p: part for part in parts for p in part.parameters}
        for p in left:
            p.grad = None
        alone = [p for p in trained if p not in left]
        if alone:  # they are summed with nobody
            self._make(key, step, alone)
        self._open[key] = step, left

    def after_forward(self, key: StageKey) -> None:
        """Make what is left of a stage replica's update; does nothing if nothing is."""
        if key not in self._open:
            return
        step, left = self._open[key]
        self._update(key, list(left))
        del self._open[key]
        at = self.sync.settle(key, self.push, self.clock)
        if at is not None:
            step.summed[key] = at
        self.sync.drop(key)
        self.move_statistics(key, step.number)

    def commit(self, wait: bool = True) -> bool:
        """Make what is left of all updates; they stand."""
        for key in list(self._open):
            self.after_forward(key)
        return True

    def close(self) -> None:
        """See WeightUpdates.close."""
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._open.clear()

    def report(self, step: int, program: Program) -> Report:
        """See WeightUpdates.report; the ends of sums are set where the host's clock can say them."""

        def complete(times: NDArray[np.float64]) -> float:
            for key, (one, _) in list(self._open.items()):
                if one.number <= step:
                    self.after_forward(key)
            late = self._steps.pop(step)
            if isinstance(self.clock, HostClock):
                self.mark_sums(program, times, late.summed)
            return float(torch.stack(late.squares).sum()) if late.squares else 0.0

        return complete

    def _before(self, key: StageKey, read: Sequence[nn.Parameter], *_call: object) -> None:
        if key in self._open:
            self._update(key, read)

    def _update(self, key: StageKey, parameters: Sequence[nn.Parameter]) -> None:
        """Make the parts of an update that these parameters are in, unless they are made."""
        step, left = self._open[key]
        for parameter in parameters:
            part = left.get(parameter)
            if part is None:
                continue
            for p in part.parameters:
                left.pop(p)
            part.take()
            self._make(key, step, part.parameters)

    def _make(self, key: StageKey, step: LateStep, parameters: Sequence[nn.Parameter]) -> None:
        step.squares.append(self.step_optimizer(key, step.lr, parameters))  # those alone have a gradient
        for p in parameters:
            p.grad = None

    def _take_bucket(self, key: StageKey, number: int) -> None:
        summed = self.sync.prioritised(key)
        assert summed is not None
        summed.take(number, self.push)

    def _take_tie(self, tie: TieSum, held: Sequence[nn.Parameter]) -> None:
        total = tie.wait(self.push)
        for p in held:
            p.grad = total.clone()


# Weight gradients and updates on a second stream, beside forwards and input gradients (out-of-order backprop).
#
# The first stage's weight gradient stays on the main stream: nothing is left there to run beside it. A stage is updated
# as soon as its last weight gradient is computed; a forward waits for the update of what it reads, and for nothing
# else. Weight gradients that the plan puts beside the next step's forward are held back until that begins.
#
# Source: Oh et al. 2022 (OOO backprop), section 4.1.


class SideUpdates(LateUpdates):
    """Makes the weight gradients and updates of one device's stage replicas.

    Args:
        trained: what the updates are about; its sums are of parameters that several stages hold.
        stream: the second stream.
        held: per stage whose last weight gradient of a step is held back, the stage before whose next forward it
            begins.
    """

    def __init__(self, trained: Trained, stream: SideStream, held: Mapping[int, int]) -> None:
        super().__init__(trained)
        self.stream, self._until = stream, held
        copies = {p for _, copies in self.sync.ties for p in copies}
        tied = frozenset(key for key, module in self.modules.items() if copies & set(module.trained.values()))
        self._group = {key: tied if key in tied else frozenset({key}) for key in self.modules}
        self._first = min(self.modules)
        self.reads = True
        """Whether the host reads the norms of steps."""
        self._held = defaultdict[int, list[tuple[LateStep, StageKey, MicrobatchState, Callable[[], None]]]](list)
        """By the stage before whose forward they begin."""
        self._weights: dict[StageKey, Done] = {}
        self._updates: dict[StageKey, Done] = {}
        self._mixed: set[StageKey] = set()
        """Stages with a parameter to whose gradient both streams add."""

    def weight_gradients(self, key: StageKey, saved: MicrobatchState, compute: Callable[[], None]) -> None:
        """See WeightUpdates.weight_gradients."""
        step = next(reversed(self._steps.values()))
        if key not in self._weights and any(p.grad is not None for c in saved.closures for p in c.parameters):
            self._mixed.add(key)
        if key[0] in self._until and step.left[key] == 1:
            self._held[self._until[key[0]]].append((step, key, saved, compute))
        else:
            self._issue(step, key, saved, compute)

    def _issue(self, step: LateStep, key: StageKey, saved: MicrobatchState, compute: Callable[[], None]) -> None:
        if key == self._first:
            compute()
        else:
            self._weights[key] = self.stream.run(compute, keep=list(saved.closures))
        step.left[key] -= 1
        group = self._group[key]
        if not any(step.left[one] for one in group):
            self._update(step, group)
        if not any(step.left.values()):
            step.known = self.stream.run(partial(self._add_up, step))

    def _update(self, step: LateStep, group: frozenset[StageKey]) -> None:
        work = partial(self._make, step, group)
        on_main = self._first in group  # behind what the second stream still has to do, the first forward would wait
        for key in group:
            done = self._weights.pop(key, None)
            if on_main and done is not None:
                done.wait()
        if on_main:
            work()
            return
        # The gradients of what is not deferred are the main stream's, and the update drops them.
        gradients = [p.grad for key in group for p in self.modules[key].trained.values()]
        self._updates.update(dict.fromkeys(group, self.stream.run(work, keep=gradients)))

    def _make(self, step: LateStep, group: frozenset[StageKey]) -> None:
        if len(group) > 1:
            self.sync.finish_ties(self.push)
        for key in sorted(group):
            step.squares.append(self.step_optimizer(key, step.lr, self.modules[key].trained.values()))
            self.sync.drop(key)

    def _add_up(self, step: LateStep) -> None:
        total = torch.stack(step.squares).sum()
        step.total = to_host(total) if self.reads else total

    def join(self, step: int) -> Tensor:
        """Let the main stream wait for all of a step, and forget it; return its squared norm, on the device."""
        self.commit()
        one = self._steps.pop(step)
        assert one.known is not None, "every weight gradient of the step has been issued"
        one.known.wait()
        self._weights.clear()
        assert one.total is not None
        return one.total

    def abandon(self, step: int) -> None:
        """Forget a step that is begun again; nothing of those before it is left to do."""
        self._steps.pop(step, None)
        for left in (self._weights, self._updates, self._held):
            left.clear()

    def before_forward(self, key: StageKey) -> None:
        """See WeightUpdates.before_forward."""
        for one in self._held.pop(key[0], ()):
            self._issue(*one)
        self._issue_held(self._group[key])
        done = self._updates.pop(key, None)
        if done is not None:
            done.wait()

    def _issue_held(self, group: frozenset[StageKey]) -> None:
        """Issue what is held back of some stages: they must be updated now."""
        for at, held in list(self._held.items()):
            self._held[at] = [one for one in held if one[1] not in group]
            for one in held:
                if one[1] in group:
                    self._issue(*one)

    def before_backward(self, key: StageKey) -> None:
        """See WeightUpdates.before_backward."""
        if key in self._mixed and key in self._weights:
            self._weights[key].wait()

    def update(self, key: StageKey) -> None:
        """See WeightUpdates.update: the last weight gradient of a stage brings its update along."""
        self.move_statistics(key, self.step)

    def commit(self, wait: bool = True) -> bool:
        """Let the main stream wait for all updates; they stand."""
        self._issue_held(frozenset(self.modules))
        for key in list(self._updates):
            self._updates.pop(key).wait()
        return True

    def report(self, step: int, program: Program) -> Report:
        """See WeightUpdates.report. Times of tasks of the second stream stay those at which they were issued."""
        if step not in self._steps:  # it ran as a graph
            return super().report(step, program)

        def complete(times: NDArray[np.float64]) -> float:
            one = self._steps.pop(step)
            if any(one.left.values()):
                self._issue_held(frozenset(self.modules))
            assert one.known is not None, "every weight gradient of the step has been issued"
            one.known.synchronize()
            return float(one.total) if one.total is not None else 0.0

        return complete

    def close(self) -> None:
        """See WeightUpdates.close."""
        self._held.clear()
        super().close()
        self.stream.close()
        self._weights.clear()
        self._updates.clear()
