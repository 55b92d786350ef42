"""The worker: a Ray actor, one per rank and pinned to its device. It builds its stages, then runs a program per call.

Ray carries the calls and a few numbers; tensors go from worker to worker through channels.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
import torch.distributed as dist

from raypipe.checkpoint import Checkpoint, open_checkpoint, write_snapshot
from raypipe.errors import TransportError
from raypipe.models import LayeredModel, build_model
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.metrics import Preprocess
from raypipe.runtime.executor.step import MOST_STEPS, StageReport, StartedStep, StepResult, Written
from raypipe.runtime.graphs.step_executor import executor_for
from raypipe.runtime.hosts import node_files
from raypipe.runtime.hosts.host_check import HostQuestion, HostReport, report_host
from raypipe.runtime.process.memory import MemoryReports, peak_bytes, resident_bytes
from raypipe.runtime.process.set_up import (
    choose_precision,
    compute_deterministically,
    first_backward,
    heap_bytes,
    set_up_cuda,
    set_up_process,
)
from raypipe.runtime.recovery.failure import raises_device_errors
from raypipe.runtime.recovery.flight_recorder import FOLDER as FLIGHT
from raypipe.runtime.recovery.flight_recorder import DevicePlace, FlightRecorder, read_left
from raypipe.runtime.recovery.replacement import (
    Transfer,
    leave,
    part,
    parts_when_lost,
    receive_stage,
    send_stage,
    settle,
)
from raypipe.runtime.setup.communicators import Communicators, Location, Topology, locate, own_address
from raypipe.runtime.setup.setup import (
    TENSOR_GROUP,
    Setup,
    build_stage,
    io_specs_of,
    own_channels,
    own_groups,
)
from raypipe.runtime.stage.inputs import Feed
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.state.shard_writer import SaveBegun, ShardWriter, Store, Write, put_snapshot, send_snapshot
from raypipe.runtime.state.state import read_previous, read_state, state_to_save
from raypipe.runtime.update.collectives import wait_for
from raypipe.runtime.update.gradients import GradientSync, tied_over_devices
from raypipe.runtime.update.ledger import Facts, Ledger, Standing
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.runtime.update.optimizer import learning_rate, make_optimizer
from raypipe.runtime.update.shards import divide, updated
from raypipe.runtime.update.side_stream import prefer_main_stream
from raypipe.runtime.update.weight_versions import WeightVersions
from raypipe.runtime.worker.samples import device_feed
from raypipe.runtime.worker.settings import (
    FOLDER,
    ProfilerWindow,
    dtype_of_sums,
    first_k_tuner,
    norm_shares,
    step_settings,
)
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.microbatch_order import Order
from raypipe.schedule.sharding import CONTEXT_GROUP, EXPERT_GROUP, StageKey
from raypipe.signals import told_to_go
from raypipe.tensor import Axis, ProcessGroup, SoloGroup, TensorGroup, set_group

if TYPE_CHECKING:
    from raypipe.runtime.worker.compilation import Compilation


class StageWorker:
    """The process of one rank. The driver calls the same methods in the same order on every worker."""

    executor_class: ClassVar[type[Executor]] = Executor
    sync_class: ClassVar[type[GradientSync]] = GradientSync
    ledger_class: ClassVar[type[Ledger]] = Ledger
    reads_whole: ClassVar[bool] = True
    """Whether steps have the samples that the job says, and not just any."""
    write_shard: ClassVar[Write] = staticmethod(write_snapshot)

    def __init__(self, rank: int, title: str) -> None:
        self.rank, self.title = rank, title
        set_up_cuda()  # before torch asks for a GPU
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        set_up_process(self.device)
        self.memory_reports = MemoryReports(self.device)
        self.shard_writer = ShardWriter()
        self.apart = False
        """Whether this device has left the groups that it shared with others."""
        self.broken = False
        """Whether its GPU's context is broken: then only another process can use the GPU."""
        self.compilation: Compilation | None = None
        """What compiles this device's stages; None where the job does not want it."""
        self.parted: Standing | None = None
        """How far it was then, where it may go on with the same plan."""

    def __repr__(self) -> str:
        return self.title

    def become(self, rank: int, title: str) -> None:
        """Be the worker of another rank from the next ``setup`` on."""
        self.rank, self.title = rank, title

    def whereabouts(self) -> str:
        """Name this device and the task it is running, for error messages."""
        device, executor = f"{self.title} · device {self.rank}", getattr(self, "executor", None)
        if executor is None or executor.doing is None:
            return device
        step = f"step {executor.step + 1}" if executor.training else f"validation batch {executor.step}"
        return f"{device}, {executor.doing.task} of {step}"

    def locate(self) -> Location:
        """Return where this worker runs, and listen there for the rendezvous."""
        return locate(self.rank, self.title, self.device)

    def on_node(self, name: str, *args: object) -> object:
        """Call a function of ``node_files``, for a node that does not share the run's directory."""
        return getattr(node_files, name)(*args)

    def read_left(self, folder: Path | str, pids: Mapping[int, int]) -> list[DevicePlace]:
        """Read where devices of this node are (``flight_recorder.read_left``)."""
        return read_left(folder, pids)

    def report(self, question: HostQuestion) -> HostReport:
        """Report whether this worker's node can work with the others."""
        return report_host(question, own_address())

    @raises_device_errors
    def setup(self, setup: Setup) -> tuple[int, list[str]]:
        """Join the process groups, open the channels and build the stages.

        Returns:
            The number of parameters (elements) held here, and the names of the parameters whose weight gradient is
            computed in B because it cannot be deferred to W.

        Raises:
            TransportError: another worker cannot be reached.
            CheckpointError: the checkpoint does not fit the model.
        """
        self._leave()
        self._begin(setup)
        self._build(setup)
        checkpoint = setup.checkpoint
        if isinstance(checkpoint, Path):
            checkpoint = open_checkpoint(checkpoint, verify=False)  # the driver has verified it
        if checkpoint is not None:
            for key, module in self.modules.items():
                read_state(checkpoint, module, self.optimizers[key], setup.tied, setup.ranks, self.shards.get(key))
        self._assemble(setup, checkpoint)
        # These objects live as long as the run, so the garbage collector need not scan them again.
        gc.collect()
        gc.freeze()
        held = self.modules.values()
        return sum(p.numel() for m in held for p in m.named.values()), [name for m in held for name in m.joint_names]

    @raises_device_errors
    def compile_stages(self, waits: bool = False, replaces: bool = False) -> list[StageReport]:
        """Begin to compile this device's stages, or with ``waits`` compile them; return what became of those done.

        A device that ``replaces`` another does not keep those that go on with it waiting, where it may begin eagerly.
        """
        from raypipe.runtime.worker.compilation import Compilation  # it imports the compiler

        self.compilation = Compilation(self.setup_data, self.executor, waits=waits, replaces=replaces)
        return self.compilation.begin()

    def swap_compiled(self, step: int) -> None:
        """Run the compiled stages from ``step`` on, where this device has any that it does not run yet."""
        if self.compilation is not None:
            self.compiled_since += self.compilation.swap(step)

    def _begin(self, setup: Setup) -> None:
        """Join the other devices."""
        self.setup_data, self.apart, self.parted = setup, False, None
        self.started: dict[int, StartedStep] = {}
        self.divided_by: dict[Axis, TensorGroup] = {}
        self.compilation = None
        self.compiled_since: list[StageReport] = []
        choose_precision(self.device, setup.job.train.tf32)
        first_backward()
        if setup.job.train.deterministic:
            compute_deterministically()
        self.communicators = Communicators(setup.rank, setup.topology, self._backend(setup.topology))

    def part(self) -> Standing | None:
        """Leave the channels and groups for good, because a device has died or the devices change.

        It does nothing more until ``rejoin`` or another ``setup``.

        Returns:
            How far this device is; None where the run does not recover in place.
        """
        if not self.apart:
            self.apart = True
            for axis in get_args(Axis):
                set_group(SoloGroup(), axis)
            self.divided_by.clear()  # a group's connections end with the last reference to it
            if self.executor.updates.ledger is None:
                leave(self.executor, self.communicators)
            else:
                self.parted = part(self.executor, self.communicators)
        return self.parted

    @raises_device_errors
    def rejoin(self, setup: Setup, moved: Sequence[Transfer], facts: Facts | None) -> None:
        """Join the others again after one has been replaced, in the state after ``setup.done`` steps.

        Args:
            setup: as that of ``setup``, for the new members. Its checkpoint is not read.
            moved: the state that replacements receive from others, in one order for all.
            facts: see ``replacement.settle``.

        Raises:
            TransportError: another worker cannot be reached.
        """
        survives = self.parted is not None
        compilation = self.compilation if survives else None
        if self.parted is not None:
            settle(self.executor, self.parted, setup.done, facts)
        self._begin(setup)
        if not survives:
            self._build(setup)
        world = self.communicators.world
        assert world is not None
        for one in moved:
            if one.sender == self.rank:
                send_stage(world, one.receiver, self.modules[one.source], self.optimizers[one.source])
            elif one.receiver == self.rank:
                receive_stage(world, one.sender, self.modules[one.target], self.optimizers[one.target])
        self._assemble(setup)
        if compilation is not None:  # it goes on, for the same modules
            compilation.go_on(self.executor)
            self.compilation = compilation
        if not survives and setup.job.train.compile != "none":
            self.compiled_since += self.compile_stages(replaces=True)

    def _own_groups(self, setup: Setup) -> dict[str, dist.ProcessGroup]:
        """Return this process's groups by the names that its device has for them."""
        served_by = setup.topology.served_by
        return own_groups(self.communicators.groups, setup.device, setup.tensor_rank, setup.tensor, served_by)

    def _model(self, setup: Setup) -> LayeredModel:
        """Build the model, without parameters."""
        return build_model(setup.job, setup.fields, setup.tensor_rank, setup.parallel, setup.ranks["experts"])

    def _feed(self, setup: Setup, model: LayeredModel) -> Feed:
        """Make what reads the raw inputs of the stages."""
        return device_feed(setup, model, self.modules, self.device, self.reads_whole)

    def _build(self, setup: Setup) -> None:
        """Build the stages and their optimizers."""
        job = setup.job
        self.plan = plan = self._model(setup)
        plan.slices = max(setup.slices, setup.parallel.context)
        self.io_specs = specs = io_specs_of(setup, plan)
        self.modules: dict[StageKey, StageModule] = {
            (stage, replica): build_stage(setup, plan, specs, stage, self.device)
            for replica, devices in enumerate(setup.placement)
            for stage, device in enumerate(devices)
            if device == setup.device
        }
        whole, groups = tied_over_devices(setup.tied), self._own_groups(setup)
        of = setup.placement, whole, groups, dtype_of_sums(setup), job.train, setup.expert_ranks
        self.shards = divide(self.modules, setup.sharding, *of)
        self.optimizers = {
            key: make_optimizer(job.train, *updated(module, self.shards.get(key)))
            for key, module in self.modules.items()
        }

    def _assemble(self, setup: Setup, checkpoint: Checkpoint | None = None) -> None:
        """Make the executor of the stages, on the open communicators."""
        job, communicators = setup.job, self.communicators
        plan, groups = self.plan, self._own_groups(setup)
        rule = setup.versions
        versions = {} if rule == "flush" else {k: WeightVersions(m, rule) for k, m in self.modules.items()}
        if checkpoint is not None:
            for key, kept in versions.items():
                kept.restore(read_previous(checkpoint, self.modules[key], setup.tied, setup.ranks))
        feed = self._feed(setup, plan)
        senders = own_channels(communicators.senders, setup.tensor)
        receivers = own_channels(communicators.receivers, setup.tensor)
        if setup.parallel.side_stream is not None:
            prefer_main_stream(self.device)
        settings = step_settings(setup, self.device, plan.batch_statistics, bool(self.shards))
        sync = self.sync_class(
            setup.device,
            self.modules,
            setup.placement,
            setup.tied,
            groups,
            setup.tensor_rank,
            self.shards,
            by_layer=setup.parallel.by_layer,
            tuner=first_k_tuner(setup, self.device),
            dtype=dtype_of_sums(setup),
            expert_ranks=setup.expert_ranks,
        )
        self.executor = executor_for(setup, self.device, self.executor_class)(
            settings,
            self.modules,
            self.optimizers,
            plan.task,
            feed,
            sync,
            self._shares(sync.complete, setup),
            senders,
            receivers,
            self.io_specs,
            versions,
        )
        self.executor.measures = setup.search_recompute
        if job.train.copy_every == 1:
            # Then the step that has ended last is the only one that is not in a complete copy, however long these take.
            self.executor.hold_updates = partial(self.shard_writer.arrive, communicators.silent_hosts.lost)
        if setup.data.parent.is_dir():  # else it is a profile's, on another host
            of = (self.rank, setup.device, self.title, os.getpid())
            self.executor.recorder = FlightRecorder(setup.data.parent / FLIGHT, *of)
        self.profiler = ProfilerWindow(job.train.profile, setup.data.parent / FOLDER, self.rank, self.device)
        self.divided_by = {
            "tensor": self._group("tensor", groups.get(TENSOR_GROUP)),
            "experts": self._group("experts", groups.get(EXPERT_GROUP)),
        }
        self._group("context", groups.get(CONTEXT_GROUP))

    def _group(self, axis: Axis, members: dist.ProcessGroup | None) -> TensorGroup:
        """Make a group that divides layers with this process known to them."""
        group: TensorGroup = SoloGroup()
        if members is not None:
            # Keep sending this process's messages while it waits for the group: another rank of the group may need
            # one of them (through its pipeline neighbours) before it can join the collective.
            push = self.executor.outgoing.push
            group = ProcessGroup(members, lambda what, work: wait_for(what, work, push), axis)
        set_group(group, axis)
        return group

    def _shares(self, alone: bool, setup: Setup) -> Shares | DeviceShares:
        """Return what exchanges the shares of the gradient norm; ``alone`` if every device knows the norm by itself."""
        world = self.communicators.world
        if setup.recovers and world is not None:
            return self.ledger_class(world, setup.done, 2 * MOST_STEPS)
        world = None if alone else world
        return norm_shares(setup, self.device, world, self._backend(setup.topology))

    def _backend(self, topology: Topology) -> str:
        own_gpus = len({p.device for p in topology.peers}) == len(topology.peers)
        return "nccl" if self.device.type == "cuda" and own_gpus and dist.is_nccl_available() else "gloo"

    def leave(self) -> Any:
        """Leave the plan for good, whatever became of the others; the process waits for the next ``setup``.

        Returns:
            Where it runs (``Setup.place``); None where it was never set up.

        Raises:
            TransportError: it cannot: its GPU's context is broken. Whoever asked ends the process.
        """
        if self.broken:
            raise TransportError(self.whereabouts(), "its GPU's context is broken", "start another process on its GPU")
        if hasattr(self, "executor"):
            self.part()
        self._leave()
        return self.setup_data.place if hasattr(self, "setup_data") else None

    def _leave(self) -> None:
        """Close what an earlier, perhaps failed, ``setup`` opened: a worker may serve several plans in turn."""
        self.shard_writer.drop()
        if self.compilation is not None:
            self.compilation.close()
        if hasattr(self, "executor"):
            self.executor.close()
        if hasattr(self, "communicators"):
            self.communicators.close()
        for module in getattr(self, "modules", {}).values():
            module.release()
        for name in ("communicators", "executor", "modules", "optimizers"):
            self.__dict__.pop(name, None)

    @parts_when_lost
    def run_steps(
        self, step: int, parts: Sequence[Part] = (WHOLE,), orders: Mapping[int, Order] = MappingProxyType({})
    ) -> list[StepResult] | None:
        """Run training steps from ``step`` on, counted from 0, one for each of ``parts``.

        ``orders``: of those whose micro-batches are not in the order of the data (``Feed.arrange``). Reports of what
        happened beside steps come with the last result, so that none is lost with a step that fails.

        Returns None where updates are made while the next step runs, and in a run on GPUs, where steps are only
        queued: ``result`` returns each later, best after the next call, so that the GPU has work while the host waits.
        """
        for number, order in orders.items():
            self.executor.feed.arrange(number, order)
        results = [self.run_step(step + k, part) for k, part in enumerate(parts)]
        done = [one for one in results if one is not None]
        return [*done[:-1], self._with_reports(done[-1])] if done else None

    def run_step(self, step: int, part: Part = WHOLE) -> StepResult | None:
        """Run one step of ``run_steps``; the returned times are on the run's shared clock."""
        if self.compilation is not None:
            self.compiled_since += self.compilation.before_step(step)
        self.profiler.begin(step + 1, self.executor)
        started = self.executor.start(self.setup_data.train[part], step, learning_rate(self.setup_data.job.train, step))
        self.profiler.end(step + 1, self.executor)
        later = self.setup_data.parallel.late_updates  # some of the result is only known when the next step has begun
        if not later and all(peer.device == "cpu" for peer in self.setup_data.topology.peers):
            return self._timed(step, started)
        self.started[step] = started
        return None

    @parts_when_lost
    def result(self, step: int) -> list[StepResult]:
        """Wait for the end of a step that ``run_steps`` has queued, and return its result.

        Raises:
            TransportError: the step was not queued, because ``run_steps`` failed; or it does not end.
        """
        started = self.started.pop(step, None)
        if started is None:
            raise TransportError(f"step {step + 1}", "it was not started", "see the error that came before")
        return [self._with_reports(self._timed(step, started))]

    def _timed(self, step: int, started: StartedStep) -> StepResult:
        result = started.result()
        if self.compilation is not None:
            self.compilation.after_step(step, float((result.times[:, 1] - result.times[:, 0]).sum()))
        return replace(result, times=self.communicators.clock.shared(result.times))

    def _with_reports(self, result: StepResult) -> StepResult:
        """Add what else there is to say since the result before."""
        compiled, self.compiled_since = tuple(self.compiled_since), []
        return replace(
            result,
            device_memory=self.memory_reports.due(),
            written=self.shard_writer.ended(),
            compiled=compiled,
            compile_state="settled" if self.compilation is None else self.compilation.state,
            notices=self.executor.notices() + (() if self.compilation is None else self.compilation.notices()),
            leaves=told_to_go(),
        )

    @parts_when_lost
    def install(
        self, train: dict[Part, Program], evaluate: Program, recomputed: frozenset[int] | None, measures: bool
    ) -> None:
        """Run other programs from the next step on, with the same stages and placement.

        Args:
            train: step programs, by how a step begins and ends.
            evaluate: the program of a validation batch.
            recomputed: the layers that an R task recomputes; None for all of its stage. Ignored unless the worker was
                set up with ``search_recompute``.
            measures: whether to measure memory in every step.
        """
        self.setup_data = replace(self.setup_data, train=train, evaluate=evaluate)
        if self.setup_data.search_recompute:
            for module in self.modules.values():
                module.set_recomputed(recomputed)
        self.executor.measures = measures

    @parts_when_lost
    def evaluate(self, batch: int, keeps: bool = False, preprocess: Preprocess | None = None) -> StepResult:
        """Run the forward of validation batch ``batch``.

        Args:
            batch: its number, from 0.
            keeps: whether to return the predictions of the last stage.
            preprocess: what to keep of them; None for all.
        """
        if not keeps:
            return self.executor.run(self.setup_data.evaluate, batch, 0.0, split="val")
        with self.executor.computation.keeping(preprocess) as kept:
            result = self.executor.run(self.setup_data.evaluate, batch, 0.0, split="val")
        return result if self.executor.settings.tensor_rank else replace(result, predictions=tuple(kept))

    @parts_when_lost
    def save(self, directory: Path, number: int) -> SaveBegun:
        """Begin to write the parameters and optimizer state of the stages whose first holder is this device.

        With ``train.async_save`` a thread writes a copy of them, and this returns before; what becomes of it is in the
        results of the next steps (``StepResult.written``), of ``end_save``, or of the next ``save``, which waits for
        it. Where the node does not share the run's directory, the shard is then sent to the driver.

        Args:
            directory: that of the checkpoint.
            number: tells this save from others, also of the same step.

        Raises:
            CheckpointError: what was written before, or this, cannot be written.
        """
        store = put_snapshot if self.setup_data.sends_shards else partial(type(self).write_shard, directory)
        return self._begin_save(number, store, self.setup_data.job.train.async_save)

    @parts_when_lost
    def copy(self, number: int, keepers: Sequence[Any]) -> SaveBegun:
        """Begin to send what ``save`` would write to keepers (``neighbour_copies``); a thread does so."""
        self.shard_writer.arrive(self.communicators.silent_hosts.lost)
        return self._begin_save(number, partial(send_snapshot, keepers, number), beside=True)

    def _begin_save(self, number: int, store: Store, beside: bool) -> SaveBegun:
        """Copy this worker's share of the state, and ``store`` it: beside training, or before it goes on."""
        began = time.monotonic()
        written = [self.shard_writer.wait()]
        waited_s = time.monotonic() - began
        self.executor.updates.commit()
        tensors, broken = state_to_save(
            self.setup_data, self.modules, self.optimizers, self.executor.versions, self.shards, self.divided_by
        )
        if broken is None:
            self.shard_writer.begin(self.rank, number, tensors, store)
            if not beside:
                written.append(self.shard_writer.wait())
        ended = tuple(one for one in written if one is not None)
        return SaveBegun(broken, time.monotonic() - began, waited_s, ended)

    @parts_when_lost
    def is_writing(self, timeout_s: float) -> bool:
        """Return whether the write that is under way has not ended in that time."""
        return self.shard_writer.is_writing(timeout_s)

    @parts_when_lost
    def end_save(self) -> Written | None:
        """Wait for the write that is under way, and return it unless that was done before.

        Raises:
            CheckpointError: it failed.
        """
        return self.shard_writer.wait()

    def clock(self) -> float:
        """Return this host's monotonic time in seconds."""
        return time.monotonic()

    def memory_bytes(self) -> int:
        """Return the most memory that was taken of this process's GPU; on a CPU its resident memory, in bytes."""
        return peak_bytes(self.device) if self.device.type == "cuda" else resident_bytes()

    def heap_bytes(self) -> int:
        """Return the bytes that this process has allocated and not freed."""
        gc.collect()
        return heap_bytes()
