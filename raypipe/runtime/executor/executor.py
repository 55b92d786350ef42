"""The executor of one device: a table from kind of task to what it does with tensors, and the state between tasks.

What a task does is its handler's (``HANDLERS``); what is to be done about updates is the policy's
(``runtime.update``). A new kind of task is a handler more; a new way to update is a policy more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data.sample_order import Split
from raypipe.models import Inputs, Lengths, Task
from raypipe.models.host_copies import runs_behind, to_host
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.backward.segments import RecomputeBoundaries
from raypipe.runtime.executor.casts import Casts
from raypipe.runtime.executor.computation import Microbatches, PostponedGradients, StageComputation
from raypipe.runtime.executor.runner import Handler, ProgramRunner
from raypipe.runtime.executor.step import FirstK, StartedStep, StepResult, StepSettings
from raypipe.runtime.process.memory import PeakMeter, allocated_bytes
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.shapes import Ports, StageIOSpecs
from raypipe.runtime.stage.stage import MicrobatchState, StageModule, stacked, unstacked
from raypipe.runtime.transport.channel import Receiver, Sender, StageIOSpec
from raypipe.runtime.update.buckets import BucketedAllReduce
from raypipe.runtime.update.gradients import GradientSync
from raypipe.runtime.update.late_updates import LayerUpdates, SideUpdates
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.runtime.update.policy import Trained, WeightUpdates
from raypipe.runtime.update.side_stream import side_stream
from raypipe.runtime.update.updates import DeferredUpdates, StashedUpdates, Updates
from raypipe.runtime.update.weight_versions import WeightVersions
from raypipe.schedule.ir import Task as PipelineTask
from raypipe.schedule.kinds import BACKWARD, WEIGHT_GRADIENTS
from raypipe.schedule.lowering.programs import Action, Program, completed_by
from raypipe.schedule.sharding import StageKey
from raypipe.tensor import ProcessGroup, current_group


class Executor(ProgramRunner):
    """Owns the stage replicas of one device and runs programs on them."""

    updates: WeightUpdates

    def __init__(
        self,
        settings: StepSettings,
        modules: Mapping[StageKey, StageModule],
        optimizers: Mapping[StageKey, torch.optim.Optimizer],
        task: Task,
        feed: Feed,
        sync: GradientSync,
        shares: Shares | DeviceShares,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        io_spec: StageIOSpecs,
        versions: Mapping[StageKey, WeightVersions],
    ) -> None:
        count, device = settings.microbatches, settings.device
        super().__init__(count, settings.timeout_s, senders, receivers, io_spec, device, settings.message_cast)
        self.io_specs = io_spec
        self.settings = settings
        self.modules = modules
        self.task = task
        self.feed = feed
        self.sync = sync
        self.versions = versions
        self.casts = Casts(device, settings.autocast, modules.values())
        self.postponed = PostponedGradients(modules)
        self.computation = StageComputation(settings, modules, task, self.casts, self.postponed.forward)
        self.ports = {
            key: Ports.of(io_spec.ends[key[0]], m.takes_gradient, m.gives_gradient) for key, m in modules.items()
        }
        trained = Trained(modules, optimizers, sync, count, self.outgoing.push, self.clock, self.casts.drop)
        self.updates = _policy(settings, trained, shares, versions)
        self.handlers = dict(HANDLERS)
        if settings.pairs and not runs_behind(device):
            self.turns = Alternation()
        # The micro-batch ids in keys continue over the steps, as in ``p2p_buffers``.
        self._saved: dict[tuple[int, int], MicrobatchState] = {}
        self._fed: dict[int, Inputs] = {}
        self._losses: dict[int, list[Tensor]] = {}
        self._counted: dict[int, int] = {}
        """Per step, the number of samples that ``_losses`` cover."""
        self._share = settings.microbatches if self.updates.each_microbatch else 1
        self._scales: dict[tuple[int, torch.dtype], Tensor] = {}
        self.measures = False
        """Whether to measure memory in every step."""
        self._reported_first_k: dict[StageKey, tuple[int, int]] = {}
        self._gather_waits: dict[int, float] = {}
        """Position of a task of this step -> seconds that it has waited for gathered weights."""

    def run(self, program: Program, step: int, lr: float, split: Split = "train") -> StepResult:
        """Run one step, or one validation batch, to its end; see ``start``."""
        return self.start(program, step, lr, split).result()

    def start(self, program: Program, step: int, lr: float, split: Split = "train") -> StartedStep:
        """Run one step (``split="train"``) or one forward-only validation batch (``split="val"``).

        On a GPU it is queued when this returns. The host reads neither its loss nor its norm meanwhile, so another step
        can be started before this one's result is asked for.

        Args:
            program: this device's program.
            step: number of the step or of the validation batch, from 0.
            lr: learning rate of the step.
            split: which data to run on.

        Raises:
            TransportError: a message did not arrive in time; it names task, peer and micro-batch.
        """
        self.begin(program, step, lr, split)
        meter = PeakMeter(self.settings.device) if self.measures and self.training else None
        with torch.enable_grad() if self.training else torch.no_grad(), meter or nullcontext(), self.casts.step():
            marks = self.issue(program, step)
        return self.end(marks, StepMemory(meter.peak if meter is not None else 0, self._recomputed_bytes))

    def begin(self, program: Program, step: int, lr: float, split: Split = "train") -> None:
        """Get ready for the tasks of a step; ``start`` does so."""
        self.split, self.training = split, split == "train"
        self.computation.training = self.training
        self._recomputed_bytes: dict[int, int] = {}
        if not self.training:
            self.updates.commit()
            return
        self._completes = completed_by(program)
        self.updates.begin_step(program, step, lr)
        first_k = {key: tuner.k for key, tuner in self.sync.tuners.items()}
        self.postponed.begin_step(program, self._completes, first_k)

    def _lengths(self, mb: int) -> Lengths:
        ahead, of_step = divmod(mb, self.settings.microbatches)
        return self.feed.lengths(self.split, self.step + ahead, of_step)

    def io_spec_of(self, src: int, dst: int, mb: int) -> StageIOSpec:
        """See ProgramRunner.io_spec_of; every device knows all micro-batches' lengths from the data."""
        return self.io_specs.of((src, dst), self._lengths(mb))

    def _inputs(self, mb: int) -> Inputs:
        inputs = self._fed.get(self.base + mb)
        if inputs is None:
            ahead, of_step = divmod(mb, self.settings.microbatches)
            inputs = self._fed[self.base + mb] = self.feed.inputs(self.split, self.step + ahead, of_step)
        return inputs

    def _scale(self, mb: int, dtype: torch.dtype) -> Tensor:
        """Return the gradient of a micro-batch's loss sum: one over the number of targets of its mini-batch."""
        step = self.step + mb // self.settings.microbatches
        scale = self._scales.get((step, dtype))
        if scale is None:
            exact = self._scales.get((step, torch.float64))
            if exact is None:
                value = self._share / self.feed.targets(self.split, step)
                exact = torch.full((), value, dtype=torch.float64, device=self.settings.device)
                self._scales = {(step, torch.float64): exact}
            scale = self._scales[step, dtype] = exact.to(dtype)
        return scale

    def _microbatches(self, key: StageKey, mbs: Sequence[int]) -> Microbatches:
        """Return what a stage computes on; it may do so at once, for its weights are here."""
        self._wait_gathered(key)
        ahead = mbs[0] // self.settings.microbatches
        ids = tuple(mb % self.settings.microbatches for mb in mbs)
        inputs = tuple(map(self._inputs, mbs)) if self.modules[key].reads else ()
        rows = tuple(self.feed.of_data(self.split, self.step + ahead, mb) for mb in ids)
        return Microbatches(self.step + ahead, ids, rows, inputs)

    def _forward(self, action: Action) -> None:
        """Run a forward task; stack its micro-batches where possible, because larger kernels are faster."""
        task, key = action.task, _key(action)
        self.updates.before_forward(key)
        together = len(task.mbs) > 1 and self._keeps_nothing(task) and self.modules[key].stacks
        together = together and all(self._lengths(mb) == self._lengths(task.mbs[0]) for mb in task.mbs[1:])
        for mbs in (task.mbs,) if together else [(mb,) for mb in task.mbs]:
            self._forward_of(action, mbs)
        self.updates.after_forward(key)

    def _keeps_nothing(self, task: PipelineTask) -> bool:
        """Return whether this forward keeps no graph for the backward, which would need one per micro-batch.

        That is so in validation, where the stage has no backward, and where the whole stage is recomputed.
        """
        if not self.training or self.program.ends_at.get(task.stage) == "F":
            return True
        recomputed = all((task.stage, mb) in self.program.recomputed for mb in task.mbs)
        return recomputed and self.modules[(task.stage, task.replica)].recomputes_whole

    def _forward_of(self, action: Action, mbs: Sequence[int]) -> None:
        key = stage, _ = _key(action)
        module = self.modules[key]
        weights = self.updates.weights(key, mbs[0] >= self.settings.microbatches) if self.training else None
        arrived = [
            tuple(
                t
                for m in action.receives
                if m.mb == mb
                for t in self.p2p_buffers.pop(("act", m.src_stage, stage, self.base + mb))
            )
            for mb in mbs
        ]
        has_backward = self.training and self.program.ends_at.get(stage) != "F"
        if has_backward:
            for one in arrived:
                module.track(one)
        recomputed = self.training and (stage, mbs[0]) in self.program.recomputed
        computed = self._microbatches(key, mbs)
        boundaries = graph = None
        if recomputed and not module.recomputes_whole:
            boundaries = RecomputeBoundaries()
            outputs = self.computation.run_segments(key, computed, arrived[0], weights, boundaries)
            recomputed = module.segments[-1].recomputed
        else:
            with nullcontext() if has_backward and not recomputed else torch.no_grad():
                outputs, graph = self.computation.run(key, computed, stacked(arrived), weights, remade=recomputed)
        if not module.sends_on:
            of_step = self.step + mbs[0] // self.settings.microbatches
            self._losses.setdefault(of_step, []).append(outputs[0].detach())
            self._counted[of_step] = self._counted.get(of_step, 0) + self._rows(mbs)
        sends = self.ports[key].sends
        for mb, inputs, made in zip(mbs, arrived, unstacked(outputs, len(mbs)), strict=True):
            for m in action.sends:
                if m.mb == mb:
                    payload = tuple(made[i].detach() for i in sends[m.dst_stage])
                    self.p2p_buffers[("act", stage, m.dst_stage, self.base + mb)] = payload
            if has_backward:
                saved = MicrobatchState(inputs, () if recomputed else made, weights, boundaries=boundaries)
                saved.graph = None if recomputed else graph
                self._saved[(stage, self.base + mb)] = saved

    def _rows(self, mbs: Sequence[int]) -> int:
        """Count the samples that the data really delivered for these micro-batches (if the stage reads any).

        Those of a micro-batch in slices count with its last slice, those that copies divide with the first copy.
        """
        whole = [mb for mb in mbs if (mb + 1) % self.settings.slices == 0 and not current_group("context").rank]
        inputs = [next(iter(self._inputs(mb).values()), None) for mb in whole]
        return sum(self.settings.samples_per_microbatch if x is None else len(x) for x in inputs)

    def kept(self, stage: int, mb: int) -> MicrobatchState:
        """Return what a stage keeps of a micro-batch between its forward and its last backward task."""
        return self._saved[stage, self.base + mb]

    def _recompute(self, action: Action) -> None:
        """Recompute the activations that the forwards of micro-batches did not keep."""
        key = _key(action)
        for mb in action.task.mbs:
            before = allocated_bytes(self.settings.device) if self.measures else 0
            self.computation.recompute(key, self._microbatches(key, (mb,)), self.kept(key[0], mb))
            if self.measures:
                made = allocated_bytes(self.settings.device) - before
                self._recomputed_bytes[key[0]] = max(made, self._recomputed_bytes.get(key[0], 0))

    def _backward(self, action: Action) -> None:
        task, key = action.task, _key(action)
        stage, module = key[0], self.modules[key]
        also_weights = task.kind in WEIGHT_GRADIENTS
        for mb in task.mbs:
            at = self.base + mb
            saved = self._saved[(stage, at)]
            early, watched = self._early_all_reduce(task, mb), False
            postponed = self.postponed.of(key, mb)
            self._wait_gathered(key)
            if also_weights:
                self.updates.open(key)
            self.updates.before_backward(key)
            if saved.back is None:
                # With several backwards for one micro-batch, nobody knows which of them is a parameter's last.
                single = saved.graph is None and saved.boundaries is None
                watched = single and (not module.defers or postponed is not None)
                with early.watch_backward(postponed or ()) if early is not None and watched else nullcontext():
                    back = module.run_backward(
                        saved, self._gradients(action, saved, mb), self.computation.turns, also_weights
                    )
                saved.ran = True
            else:  # out-of-order backprop: this micro-batch's W came first and has run the backward already
                back = saved.back
            if also_weights:
                self._finish_weights(module, saved, key, early, postponed if watched else None)
            if also_weights or saved.back is not None or self.program.ends_at.get(stage) == "B":
                del self._saved[(stage, at)]
            returns = self.ports[key].returns
            for m in action.sends:
                if m.mb == mb:
                    self.p2p_buffers[("grad", stage, m.dst_stage, at)] = tuple(back[i] for i in returns[m.dst_stage])

    def _weights(self, action: Action) -> None:
        task, key = action.task, _key(action)
        module = self.modules[key]
        for mb in task.mbs:
            at = (task.stage, self.base + mb)
            saved = self._saved[at]
            self.updates.open(key)
            if not saved.ran:
                self._wait_gathered(key)
                saved.back = module.run_backward(saved, self._gradients(action, saved, mb), self.computation.turns)
                saved.ran = True
            self._finish_weights(module, saved, key, self._early_all_reduce(task, mb))
            if (task.stage, mb) not in self.program.weights_first:
                del self._saved[at]

    def _free(self, action: Action) -> None:
        self.casts.drop()  # copies of what is freed
        for flat in self.sync.shards[_key(action)].flats:
            flat.release()

    def _wait_gathered(self, key: StageKey) -> None:
        """Wait until a sharded stage's weights are here."""
        stage = self.sync.shards.get(key)
        if stage is not None:
            began = time.perf_counter()
            for flat in stage.flats:
                flat.wait_gathered(self.outgoing.push)
            if not runs_behind(self.settings.device):  # else the device waits, and not the host
                waited = self._gather_waits.get(self.position, 0.0) + time.perf_counter() - began
                self._gather_waits[self.position] = waited

    def _finish_weights(
        self,
        module: StageModule,
        saved: MicrobatchState,
        key: StageKey,
        early: BucketedAllReduce | None,
        watched_but: Collection[Tensor] | None = None,
    ) -> None:
        """Compute deferred weight gradients; ``watched_but``: the backward was watched for all but these."""
        self.postponed.sort(key, saved.closures)
        computed = None
        if early is not None and module.defers:
            early.expect((p for closure in saved.closures for p in closure.parameters), watched_but)
            computed = early.computed
        self.updates.weight_gradients(key, saved, partial(module.run_weight_gradients, saved, computed))

    def _early_all_reduce(self, task: PipelineTask, mb: int) -> BucketedAllReduce | None:
        """Return the all-reduce whose buckets may start while this micro-batch's gradients are computed, if any.

        That is so for the last gradients of a stage replica whose AR follows at once.
        """
        if task not in self._completes or mb != task.mbs[-1]:
            return None
        return self.updates.early((task.stage, task.replica))

    def _gradients(self, action: Action, saved: MicrobatchState, mb: int) -> tuple[Tensor, ...]:
        stage = action.task.stage
        at = self.base + mb
        arrived = [
            (m.src_stage, self.p2p_buffers.pop(("grad", m.src_stage, stage, at))) for m in action.receives if m.mb == mb
        ]
        if not arrived:
            scale = self._scale(mb, saved.outputs[0].dtype)
            # So that a loss that is not finite makes the norm so: 0 * inf is not a number, and all devices hear of it.
            return (scale + 0.0 * saved.outputs[0].detach(),) if self.settings.skips else (scale,)
        return self.ports[stage, action.task.replica].summed(arrived)

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """See ProgramRunner.before_updates."""
        if self.updates.ledger is not None:
            self.updates.ledger.note(self.step, *self._loss_so_far())
        super().before_updates(times)

    def _loss_so_far(self) -> tuple[float, int]:
        """Return this device's share of the step's loss, and the samples in it, once all its forwards are done."""
        losses = self._losses.get(self.step, [])
        if not losses or self.settings.tensor_rank > 0:
            return 0.0, 0
        total = float(torch.stack(losses).double().sum()) / self.feed.targets(self.split, self.step)
        return total, self._counted.get(self.step, 0)

    def forget(self) -> None:
        """See ProgramRunner.forget."""
        self._saved.clear()
        self._losses.clear()
        self.computation.figures.clear()
        self.computation.pieces.clear()
        self._counted.clear()
        self._gather_waits.clear()

    def notices(self) -> tuple[str, ...]:
        """Return what there is to say of how steps run, once."""
        return ()

    def close(self) -> None:
        """Let go of what refers back to this, so that it ends when nobody uses it any more."""
        self.updates.close()

    def _changed_first_k(self) -> tuple[FirstK, ...]:
        """Return k of the stage replicas whose k, or limit, is new in this step."""
        tuners = self.sync.tuners
        now = {key: (tuner.k, tuner.most) for key, tuner in tuners.items()}
        before = self._reported_first_k or {key: (0, len(self.modules[key].trained_by_block)) for key in now}
        self._reported_first_k = now
        return tuple(
            FirstK(key[0], *new, tuple(tuners[key].peaks)) for key, new in now.items() if new != before.get(key)
        )

    def end(self, marks: NDArray[np.float64], memory: StepMemory) -> StartedStep:
        """Return the result of a step whose last task has been issued."""
        losses = self._losses.pop(self.step, [])
        targets = self.feed.targets(self.split, self.step) if losses else 1
        samples = self._counted.pop(self.step, 0)
        if self.settings.tensor_rank > 0:
            losses, samples = [], 0
        self.feed.drop(self.split, self.step)
        reduced, gathers, scatters = self.sync.take_counts()
        if self.program.drains:
            left = [*self._saved, *self.p2p_buffers]
            self._saved.clear()
            self.p2p_buffers.clear()
            assert not left, f"a verified program leaves nothing behind, but {left[:3]} is left"
        until = self.base + self.settings.microbatches
        self._fed = {mb: inputs for mb, inputs in self._fed.items() if mb >= until}
        all_reduces, group = 0, current_group()
        if isinstance(group, ProcessGroup):
            all_reduces, group.all_reduces = group.all_reduces, 0
        exchanged, copies = 0.0, current_group("experts")
        if isinstance(copies, ProcessGroup):
            exchanged, copies.all_to_alls = copies.all_to_alls, 0.0
        result = StepResult(
            0.0,
            samples,
            0.0,
            marks,
            self.received,
            self.received_bytes,
            reduced,
            all_reduces,
            memory,
            self.updates.optimistic,
            exchanged,
            gathers,
            scatters,
            first_k=self._changed_first_k() if self.training else (),
            data_wait_s=self.feed.take_wait_s(),
            gather_waits=tuple(self._gather_waits.items()),
            message_waits=self.message_waits,
            sums_wait_s=self.updates.sums_wait_s if self.training else 0.0,
            figures=self.computation.take_figures(targets),
        )
        self._gather_waits.clear()
        loss = to_host(torch.stack(losses).double().sum()) if losses else None
        norm_squared = None
        loads: dict[str, Tensor] = {}
        if self.training:
            norm_squared = self.updates.report(self.step, self.program)
            for path, experts in (found for module in self.modules.values() for found in module.routed.items()):
                if (counts := experts.take_loads()) is not None:
                    loads[path] = loads[path] + counts if path in loads else counts
        started = StartedStep(
            result,
            loss,
            targets,
            self.clock.end(marks),
            self.times_of,
            {k: to_host(v) for k, v in loads.items()},
            norm_squared,
        )
        if self.training and runs_behind(self.settings.device):
            self.feed.prefetch(self.split, self.step + 1)  # the host is ahead: it reads while the device works
        return started


HANDLERS: Final[Mapping[str, Handler]] = {
    "F": Executor._forward,
    **dict.fromkeys(BACKWARD, Executor._backward),
    "W": Executor._weights,
    "R": Executor._recompute,
    "AG": lambda executor, action: executor.sync.gather(_key(action)),
    "RS": lambda executor, action: executor.sync.reduce_scatter(_key(action)),
    "FREE": Executor._free,
    "AR": lambda executor, action: executor.updates.sum(_key(action)),
    "U": lambda executor, action: executor.updates.update(_key(action)),
}
"""What runs each kind of task (``schedule.kinds``)."""


def _key(action: Action) -> StageKey:
    return action.task.stage, action.task.replica


def _policy(
    settings: StepSettings,
    trained: Trained,
    shares: Shares | DeviceShares,
    versions: Mapping[StageKey, WeightVersions],
) -> WeightUpdates:
    """Return what decides about the updates of a device."""
    if settings.by_layer:
        return LayerUpdates(trained)
    if settings.side_stream is not None:
        return SideUpdates(trained, side_stream(settings.device), settings.side_stream)
    if any(v.rule == "stash" for v in versions.values()):
        return StashedUpdates(versions, trained)
    how = shares, settings.clip, settings.update, settings.skips
    return DeferredUpdates(versions, trained, *how) if versions else Updates(trained, *how)
