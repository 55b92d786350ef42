"""Weight gradients and updates on a second stream, beside forwards and input gradients (out-of-order backprop).

The first stage's weight gradient stays on the main stream: nothing is left there to run beside it. A stage is updated
as soon as its last weight gradient is computed; a forward waits for the update of what it reads, and for nothing else.
Weight gradients that the plan puts beside the next step's forward are held back until that begins. There is no global
gradient norm before all of them are in, so nothing can be clipped.

Source: Oh et al. 2022 (OOO backprop), section 4.1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.models.host_copies import to_host
from raypipe.runtime.stage.stage import MicrobatchState
from raypipe.runtime.update.gradients import StageKey
from raypipe.runtime.update.optimizer import set_rate
from raypipe.runtime.update.policy import Trained, WeightUpdates
from raypipe.runtime.update.side_stream import Done, SideStream
from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.schedule.lowering.programs import Program


@dataclass(slots=True)
class _Step:
    """A step whose updates may not all be made."""

    number: int
    lr: float
    left: Counter[StageKey]
    """Weight-gradient tasks that have not been issued."""
    squares: list[Tensor] = field(default_factory=list)
    """This device's share of the squared gradient norm, in parts."""
    total: Tensor | None = None
    """Their sum, on its way to the host."""
    known: Done | None = None
    """When ``total`` is there."""


class SideUpdates(WeightUpdates):
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
        modules, sync = self.modules, self.sync
        tied = frozenset(
            key
            for key, module in modules.items()
            if {id(p) for p in module.trained.values()} & {id(p) for copies in sync.tied_copies for p in copies}
        )
        self._group = {key: tied if key in tied else frozenset({key}) for key in modules}
        self._first = min(modules)
        self.reads = True
        """Whether the host reads the norms of steps."""
        self._open: dict[int, _Step] = {}
        """By number; the newest is the last."""
        self._held = defaultdict[int, list[tuple[_Step, StageKey, MicrobatchState]]](list)
        """By the stage before whose forward they begin."""
        self._weights: dict[StageKey, Done] = {}
        self._updates: dict[StageKey, Done] = {}
        self._mixed: set[StageKey] = set()
        """Stages with a parameter to whose gradient both streams add."""

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """See UpdatePolicy.begin_step."""
        super().begin_step(program, step, lr)
        tasks = (a.task for a in program.actions if a.task.kind in WEIGHT_GRADIENTS)
        self._open[step] = _Step(step, lr, Counter((t.stage, t.replica) for t in tasks for _ in t.mbs))

    def takes(self, key: StageKey, saved: MicrobatchState) -> bool:
        """See WeightUpdates.takes."""
        step = next(reversed(self._open.values()))
        if key not in self._weights and any(p.grad is not None for c in saved.closures for p in c.parameters):
            self._mixed.add(key)
        if key[0] in self._until and step.left[key] == 1:
            self._held[self._until[key[0]]].append((step, key, saved))
        else:
            self._issue(step, key, saved)
        return True

    def _issue(self, step: _Step, key: StageKey, saved: MicrobatchState) -> None:
        compute = partial(self.modules[key].run_weight_gradients, saved)
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

    def _update(self, step: _Step, group: frozenset[StageKey]) -> None:
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

    def _make(self, step: _Step, group: frozenset[StageKey]) -> None:
        if len(group) > 1:
            for tie in self.sync.start_ties():
                total = tie.wait(self.push)
                for copy in tie.copies:
                    copy.grad = total if copy is tie.copies[0] else total.clone()
        for key in sorted(group):
            step.squares.append(self.sync.norm_squared(self.modules[key].trained.values()))
            optimizer = self.optimizers[key]
            set_rate(optimizer, step.lr)
            optimizer.step()
            self.sync.drop(key)

    def _add_up(self, step: _Step) -> None:
        total = torch.stack(step.squares).sum()
        step.total = to_host(total) if self.reads else total

    def join(self, step: int) -> Tensor:
        """Let the main stream wait for all of a step, and forget it; return its squared norm, on the device."""
        self.commit()
        one = self._open.pop(step)
        assert one.known is not None, "every weight gradient of the step has been issued"
        one.known.wait()
        self._weights.clear()
        assert one.total is not None
        return one.total

    def abandon(self, step: int) -> None:
        """Forget a step that is begun again; nothing of those before it is left to do."""
        self._open.pop(step, None)
        for left in (self._weights, self._updates, self._held):
            left.clear()

    def before_forward(self, key: StageKey) -> None:
        """See WeightUpdates.before_forward."""
        for step, late, saved in self._held.pop(key[0], ()):
            self._issue(step, late, saved)
        self._issue_held(self._group[key])
        done = self._updates.pop(key, None)
        if done is not None:
            done.wait()

    def _issue_held(self, group: frozenset[StageKey]) -> None:
        """Issue what is held back of some stages: they must be updated now."""
        for at, held in list(self._held.items()):
            due = [one for one in held if one[1] in group]
            self._held[at] = [one for one in held if one[1] not in group]
            for step, late, saved in due:
                self._issue(step, late, saved)

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

    def report(self, step: int, program: Program) -> Callable[[NDArray[np.float64]], float]:
        """See WeightUpdates.report. Times of tasks of the second stream stay those at which they were issued."""

        def complete(times: NDArray[np.float64]) -> float:
            one = self._open.pop(step)
            if any(one.left.values()):
                self._issue_held(frozenset(self.modules))
            assert one.known is not None, "every weight gradient of the step has been issued"
            one.known.synchronize()
            return float(one.total) if one.total is not None else 0.0

        return complete

    def close(self) -> None:
        """See WeightUpdates.close."""
        self._held.clear()
        self._open.clear()
        self.stream.close()
        self._weights.clear()
        self._updates.clear()
