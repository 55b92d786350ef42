"""The executor runs each task of a program on tensors."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data.sample_order import Split
from raypipe.models import Inputs, Lengths, Task
from raypipe.models.host_copies import runs_behind, to_host
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.backward.segments import RecomputeBoundaries
from raypipe.runtime.backward.stack import stacked, unstacked
from raypipe.runtime.executor.computation import Microbatches, PostponedGradients, StageComputation, SummedStatistics
from raypipe.runtime.executor.ledger import Ledger
from raypipe.runtime.executor.runner import ProgramRunner
from raypipe.runtime.executor.step import FirstK, StartedStep, StepResult, StepSettings
from raypipe.runtime.executor.weight_casts import Casts
from raypipe.runtime.late.side_stream import side_stream
from raypipe.runtime.late.side_updates import LateUpdates, SideUpdates
from raypipe.runtime.process.memory import PeakMeter, allocated_bytes
from raypipe.runtime.shard.device_shards import DeviceShards
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.shapes import Ports, StageIOSpecs
from raypipe.runtime.stage.stage import MicrobatchState, StageModule
from raypipe.runtime.transport.channel import Receiver, Sender, StageIOSpec
from raypipe.runtime.update.bucketed_all_reduce import BucketedAllReduce
from raypipe.runtime.update.device_norm import DeviceShares
from raypipe.runtime.update.gradients import GradientSync, StageKey
from raypipe.runtime.update.layer_updates import LayerUpdates
from raypipe.runtime.update.norm import Shares
from raypipe.runtime.update.updates import Updates
from raypipe.runtime.update.weight_versions import Snapshot, WeightVersions
from raypipe.schedule.ir import Task as PipelineTask
from raypipe.schedule.kinds import BACKWARD, WEIGHT_GRADIENTS
from raypipe.schedule.lowering.programs import Action, Program, completed_by
from raypipe.tensor import ProcessGroup, current_group


class Executor(ProgramRunner):
    """Owns the stage replicas of one device and runs programs on them."""

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
        shards: DeviceShards | None = None,
    ) -> None:
        super().__init__(
            settings.microbatches,
            settings.timeout_s,
            senders,
            receivers,
            io_spec,
            settings.device,
            settings.message_cast,
        )
        self.io_specs = io_spec
        self.settings = settings
        self.modules = modules
        self.task = task
        self.feed = feed
        self.sync = sync
        self.versions = versions
        self.shards = DeviceShards({}) if shards is None else shards
        self.casts = Casts(settings.device, settings.autocast, modules.values())
        self.postponed = PostponedGradients(modules)
        self.computation = StageComputation(settings, modules, task, self.casts, self.postponed.forward)
        self.ports = {
            key: Ports.of(io_spec.ends[key[0]], m.takes_gradient, m.gives_gradient) for key, m in modules.items()
        }
        self.statistics = SummedStatistics(modules, sync, settings.microbatches)
        self.updates = Updates(optimizers, versions, sync, shares, settings.clip, settings.update, settings.skips)
        self.late: LateUpdates | None = None
        """Makes the updates instead, where there is no barrier between steps."""
        if settings.by_layer:
            self.late = LayerUpdates(modules, optimizers, sync, self.outgoing.push, self.clock, self.statistics.move)
        elif settings.side_stream is not None:
            self.late = SideUpdates(
                modules,
                optimizers,
                sync,
                side_stream(settings.device),
                settings.side_stream,
                self.outgoing.push,
                self.statistics.move,
            )
        # The micro-batch ids in keys continue over the steps, as in ``p2p_buffers``.
        self._saved: dict[tuple[int, int], MicrobatchState] = {}
        self._fed: dict[int, Inputs] = {}
        self._losses: dict[int, list[Tensor]] = {}
        self._counted: dict[int, int] = {}
        """Per step, the number of samples that ``_losses`` cover."""
        self._used: dict[StageKey, Snapshot] = {}
        # PipeDream updates after every micro-batch, so each one is a mini-batch of its own: there are no gradients to
        # sum over devices, and no norm to wait for.
        self._stashes = any(v.rule == "stash" for v in versions.values())
        self._share = settings.microbatches if self._stashes else 1
        self._scales: dict[tuple[int, torch.dtype], Tensor] = {}
        self.measures = False
        """Whether to measure memory in every step."""
        self._told_first_k: dict[StageKey, tuple[int, int]] = {}
        self._gather_waits: dict[int, float] = {}
        """Position of a task of this step -> seconds that it has waited for gathered weights."""
        self._sums_wait_s = 0.0
        self.ledger: Ledger | None = None
        """What the devices tell one another of each step, where one that dies is replaced in place."""

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
        self.split, self.training, self.lr = split, split == "train", lr
        self.computation.training = self.training
        self._squares: list[Tensor] = []
        if not self.training:
            self.commit()
        self._recomputed_bytes: dict[int, int] = {}
        if self.training:
            self._completes = completed_by(program)
            if self.ledger is not None:
                self.ledger.begun = step + 1
            self.sync.begin_step((a.task.stage, a.task.replica) for a in program.actions if a.task.kind == "AR")
            self.postponed.begin_step(program, self._completes, self.sync.first_k)
            if self.late is not None:
                self.late.begin_step(program, step, lr)

    def run_task(self, action: Action) -> None:
        """Run one task on tensors."""
        task = action.task
        kind = task.kind
        if kind == "F":
            self._forward(action)
        elif kind in BACKWARD:
            self._backward(action, also_weights=kind in WEIGHT_GRADIENTS)
        elif kind == "W":
            self._weights(action)
        elif kind == "R":
            for mb in task.mbs:
                self._recompute((task.stage, task.replica), mb)
        elif kind == "AR":
            key = (task.stage, task.replica)
            self._collect(key)
            self._complete_update(key)
            self.sync.launch(key, self.statistics.seen(key, self.step))
        elif kind == "U":
            self.update_stage((task.stage, task.replica))
        elif kind == "AG":
            self.shards.stages[task.stage, task.replica].gather()
        elif kind == "RS":
            self.shards.reduce_scatter((task.stage, task.replica))
        elif kind == "FREE":
            self.casts.drop()  # copies of what is freed
            self.shards.stages[task.stage, task.replica].release()

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
        return Microbatches(self.step + ahead, ids, inputs)

    def _forward(self, action: Action) -> None:
        """Run a forward task; stack its micro-batches where possible, because larger kernels are faster."""
        task = action.task
        if self.late is not None:
            self.late.before_forward((task.stage, task.replica))
        together = len(task.mbs) > 1 and self._keeps_nothing(task) and self.modules[(task.stage, task.replica)].stacks
        together = together and all(self._lengths(mb) == self._lengths(task.mbs[0]) for mb in task.mbs[1:])
        for mbs in (task.mbs,) if together else [(mb,) for mb in task.mbs]:
            self._forward_of(action, mbs)
        self._complete_update((task.stage, task.replica))

    def _complete_update(self, key: StageKey) -> None:
        """Make what is left of the last step's update of a stage replica."""
        if self.late is not None:
            self.late.complete(key)

    def _keeps_nothing(self, task: PipelineTask) -> bool:
        """Return whether this forward keeps no graph for the backward, which would need one per micro-batch.

        That is so in validation, where the stage has no backward, and where the whole stage is recomputed.
        """
        if not self.training or self.program.ends_at.get(task.stage) == "F":
            return True
        recomputed = all((task.stage, mb) in self.program.recomputed for mb in task.mbs)
        return recomputed and self.modules[(task.stage, task.replica)].recomputes_whole

    def _forward_of(self, action: Action, mbs: Sequence[int]) -> None:
        task = action.task
        stage = task.stage
        key = (stage, task.replica)
        module = self.modules[key]
        versions = self.versions.get(key) if self.training else None
        weights = versions.for_forward(mbs[0] >= self.settings.microbatches) if versions is not None else None
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

        Those of a micro-batch in slices count with its last slice.
        """
        whole = [mb for mb in mbs if (mb + 1) % self.settings.slices == 0]
        inputs = [next(iter(self._inputs(mb).values()), None) for mb in whole]
        return sum(self.settings.samples_per_microbatch if x is None else len(x) for x in inputs)

    def _recompute(self, key: StageKey, mb: int) -> None:
        """Recompute the activations that the forward of a micro-batch did not keep."""
        before = allocated_bytes(self.settings.device) if self.measures else 0
        self.computation.recompute(key, self._microbatches(key, (mb,)), self._saved[(key[0], self.base + mb)])
        if self.measures:
            made = allocated_bytes(self.settings.device) - before
            self._recomputed_bytes[key[0]] = max(made, self._recomputed_bytes.get(key[0], 0))

    def _backward(self, action: Action, also_weights: bool) -> None:
        task = action.task
        stage = task.stage
        module = self.modules[(stage, task.replica)]
        for mb in task.mbs:
            at = self.base + mb
            saved = self._saved[(stage, at)]
            early, watched = self._early_all_reduce(task, mb), False
            postponed = self.postponed.of((stage, task.replica), mb)
            self._wait_gathered((stage, task.replica))
            if also_weights and not self.versions:
                self._open_gradients((stage, task.replica))
            if self.late is not None:
                self.late.before_backward((stage, task.replica))
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
                self._finish_weights(module, saved, (stage, task.replica), early, postponed if watched else None)
            if also_weights or saved.back is not None or self.program.ends_at.get(stage) == "B":
                del self._saved[(stage, at)]
            returns = self.ports[stage, task.replica].returns
            for m in action.sends:
                if m.mb == mb:
                    self.p2p_buffers[("grad", stage, m.dst_stage, at)] = tuple(back[i] for i in returns[m.dst_stage])

    def _weights(self, action: Action) -> None:
        task = action.task
        module = self.modules[(task.stage, task.replica)]
        for mb in task.mbs:
            at = (task.stage, self.base + mb)
            saved = self._saved[at]
            if not self.versions:
                self._open_gradients((task.stage, task.replica))
            if not saved.ran:
                self._wait_gathered((task.stage, task.replica))
                saved.back = module.run_backward(saved, self._gradients(action, saved, mb), self.computation.turns)
                saved.ran = True
            self._finish_weights(module, saved, (task.stage, task.replica), self._early_all_reduce(task, mb))
            if (task.stage, mb) not in self.program.weights_first:
                del self._saved[at]

    def _wait_gathered(self, key: StageKey) -> None:
        """Wait until a sharded stage's weights are here."""
        stage = self.shards.stages.get(key)
        if stage is not None:
            began = time.perf_counter()
            stage.wait_gathered(self.outgoing.push)
            if not runs_behind(self.settings.device):  # else the device waits, and not the host
                waited = self._gather_waits.get(self.position, 0.0) + time.perf_counter() - began
                self._gather_waits[self.position] = waited

    def _open_gradients(self, key: StageKey) -> None:
        """Let gradients accumulate where they will be summed."""
        self.sync.open(key)
        if key in self.shards.stages:
            self.shards.open_gradients(key, self.outgoing.push)

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
        if self.late is not None and self.late.takes(key, saved):
            return
        if early is not None and module.defers:
            early.expect((p for closure in saved.closures for p in closure.parameters), watched_but)
            module.run_weight_gradients(saved, early.computed)
        else:
            module.run_weight_gradients(saved)
        if saved.weights is not None:
            self._used[key] = saved.weights

    def _early_all_reduce(self, task: PipelineTask, mb: int) -> BucketedAllReduce | None:
        """Return the all-reduce whose buckets may start while this micro-batch's gradients are computed, if any.

        That is so for the last gradients of a stage replica whose AR follows at once.
        """
        if task not in self._completes or mb != task.mbs[-1] or self.versions:
            return None
        return self.sync.early((task.stage, task.replica))

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

    def _collect(self, key: StageKey) -> None:
        """With weight versions, pass the gradients of the version that was used to the optimizer's parameters."""
        used = self._used.pop(key, None)
        if used is not None:
            self.versions[key].collect(used)

    def before_updates(self, times: NDArray[np.float64]) -> None:
        """Wait for the gradient all-reduces; when clipping, ``updates`` decides whether to wait for the global norm."""
        if self._stashes:
            return
        if self.late is not None:
            self.late.begin()
            return
        for key in self.modules:
            self._collect(key)
        began = time.perf_counter()
        self.shards.finish(self.outgoing.push)
        completed = self.sync.finish(self.outgoing.push, self.clock)
        if not runs_behind(self.settings.device):
            self._sums_wait_s = time.perf_counter() - began
        for i, action in enumerate(self.program.actions):  # an AR ends when it is complete, not when it was launched
            if action.task.kind == "AR" and (action.task.stage, action.task.replica) in completed:
                times[i, 1] = completed[(action.task.stage, action.task.replica)]
        self._squares.append(self.updates.begin(self.program.ahead is not None, self.outgoing.push))
        if self.ledger is not None:
            self.ledger.tell(self.step, self._squares[-1], *self._loss_so_far())
            if not self.updates.pending:  # else ``commit`` waits: until then the update can be taken back
                self.ledger.wait(self.outgoing.push)

    def _loss_so_far(self) -> tuple[float, int]:
        """Return this device's share of the step's loss, and the samples in it, once all its forwards are done."""
        losses = self._losses.get(self.step, [])
        if not losses or self.settings.tensor_rank > 0:
            return 0.0, 0
        total = float(torch.stack(losses).double().sum()) / self.feed.targets(self.split, self.step)
        return total, self._counted.get(self.step, 0)

    def update_stage(self, key: StageKey) -> None:
        """Update a stage replica, as the step's norm policy wants it; layer by layer, only once the sums are in."""
        if self.late is not None:
            self.late.defer(key, self.step, self.lr)
            return
        if self._stashes:
            self._collect(key)
            self._squares.append(self.sync.norm_squared())
        self.casts.drop()
        self.updates.make(key, self.lr)
        if self._stashes:
            self.statistics.move_on(key)
        elif self.updates.skipping:
            self.statistics.forget(key, self.step)
        else:
            self.statistics.move(key, self.step)
        if self.ledger is not None:
            self.ledger.updated.add(key)

    def update_pending(self) -> bool:
        """See ProgramRunner.update_pending."""
        return self.updates.pending

    def commit(self, wait: bool = True) -> bool | None:
        """See ProgramRunner.commit. Call it before anything but the next step reads weights or optimizer state."""
        if self.late is not None:
            self.late.complete_all()
        pending = self.updates.pending
        if pending and self.ledger is not None:
            if not wait and not self.ledger.heard():
                return None
            self.ledger.wait(self.outgoing.push)
        stands = self.updates.commit(self.outgoing.push, wait)
        if pending and stands is not None:
            self.casts.drop()
        return stands

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
        if self.late is not None:
            self.late.close()

    def _changed_first_k(self) -> tuple[FirstK, ...]:
        """Return k of the stage replicas whose k, or limit, is new in this step."""
        tuners = self.sync.tuners
        now = {key: (tuner.k, tuner.most) for key, tuner in tuners.items()}
        before = self._told_first_k or {key: (0, len(self.modules[key].trained_by_block)) for key in now}
        self._told_first_k = now
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
        reduced, self.sync.all_reduces = self.sync.all_reduces, 0.0
        gathers, scatters, sums = self.shards.take_counts()
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
        result = StepResult(
            0.0,
            samples,
            0.0,
            marks,
            self.received,
            self.received_bytes,
            reduced + sums,
            all_reduces,
            memory,
            self.updates.optimistic,
            gathers,
            scatters,
            first_k=self._changed_first_k() if self.training else (),
            data_wait_s=self.feed.take_wait_s(),
            gather_waits=tuple(self._gather_waits.items()),
            message_waits=self.message_waits,
            sums_wait_s=self._sums_wait_s,
            figures=self.computation.take_figures(targets),
        )
        self._gather_waits.clear()
        self._sums_wait_s = 0.0
        loss = to_host(torch.stack(losses).double().sum()) if losses else None
        squares = to_host(torch.stack(self._squares)) if self._squares else None
        late = None
        if self.late is not None and self.training:
            late = partial(self.late.report, self.step, self.program)
        started = StartedStep(result, loss, targets, squares, self.clock.end(marks), self.times_of, late)
        if self.training and runs_behind(self.settings.device):
            self.feed.prefetch(self.split, self.step + 1)  # the host is ahead: it reads while the device works
        return started
