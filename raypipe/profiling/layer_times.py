"""Measure every kind of layer on all devices at the same time, for one micro-batch size after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from statistics import median

import ray

from raypipe.cost.experts import grouped_share
from raypipe.cost.layer_work import LayerWork
from raypipe.cost.memory import parameter_bytes
from raypipe.cost.profile import LIMIT, ExpertsProfile, LayerProfile, Profile, TaskTimes
from raypipe.data import declared_fields, known_fields
from raypipe.errors import SpecError
from raypipe.graph.counted import ON_CPU, ON_GPU
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel
from raypipe.partition.pieces import tensor_ranks_of
from raypipe.profiling.effort import Effort, one_step
from raypipe.profiling.profiled_steps import (
    AFTER,
    ALIVE,
    BEFORE,
    MICROBATCHES,
    WORST,
    Samples,
    Taken,
    Way,
    alike,
    cast_bytes,
    charge,
    drift,
    fixed_and_each,
    grown_bytes,
    measured_layers,
    measured_step,
    overhead_seconds,
    step_microbatches,
    stolen,
    task_times,
    update_seconds,
)
from raypipe.profiling.profiling_worker import DeviceFacts
from raypipe.runtime.setup.communicators import Topology
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BW, Kind
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Program, programs

LONGEST = 1 << 40
"""Padding multiple that is larger than any sample, so that all samples are measured at the longest one's length."""
MEMORY: tuple[tuple[str, Way, Kind, int, int], ...] = (
    ("F", "joint", "F", BEFORE, AFTER),
    (BW, "joint", BW, BEFORE, WORST),
    ("B", "split", "B", BEFORE, WORST),
    ("W", "split", "W", AFTER, BEFORE),
)
"""Measurements of memory: name, kind of step, kind of task, and the two moments whose difference is taken."""
WAYS: tuple[Way, ...] = ("joint", "recompute", "split")
LONG = 5e8
"""Floating-point operations of one sample's forward through a layer from which on it takes long on a CPU: about ten
milliseconds, beside which the caches do not matter."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One measurement of a micro-batch size, in all ways of running the backward."""

    found: dict[Way, list[Samples]]
    """Per way, the samples of each device."""
    stolen: float
    """Share of the tasks' time in which other processes had the core."""

    @staticmethod
    def of(found: dict[Way, list[Samples]]) -> Pass:
        """Make a pass, computing ``stolen``."""
        return Pass(found, max(map(stolen, found.values())))


@dataclass(slots=True)
class LayerBench:
    """Measures the layers of a model on a group of devices."""

    job: JobSpec
    model: LayeredModel
    workers: WorkerGroup
    data: Path
    """Folder of the prepared data."""
    bounded: bool = False
    """Whether the whole measurement is bounded in time (``Effort.whole_s``), on CPUs."""
    groups: list[int] = field(init=False)
    """Per layer, the first layer of the same kind."""
    measured: list[int] = field(init=False)
    """Layers that are built and measured."""
    long: bool = field(init=False)
    """Whether tasks take so long that one measurement of each has to do, and does."""
    interrupted: bool = False
    """The user ended the measurement early."""
    passes: dict[int, list[Pass]] = field(default_factory=lambda: defaultdict(list))
    """Measurements by micro-batch size."""
    grown: dict[str, dict[int, dict[int, float]]] = field(default_factory=lambda: defaultdict(dict))
    """Measured bytes by name (``MEMORY``), micro-batch size and kind of layer."""
    casts: dict[int, dict[int, float]] = field(default_factory=dict)
    """Bytes of autocast's copies of the weights, by micro-batch size and kind of layer."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Number of elements of each parameter that is built, by name."""
    loads: dict[int, list[int]] = field(default_factory=dict)
    """By layer, the rows of each expert."""
    alone: float = 1.0
    """Time of a task while the other devices of the host are idle, over its time while all of them work."""

    def __post_init__(self) -> None:
        self.groups = alike(self.model)
        long = {kind for kind in set(self.groups) if self.bounded and self.model.flops[kind] >= LONG}
        self.measured = measured_layers(self.groups, long)
        self.long = bool(long)

    def facts(self) -> list[DeviceFacts]:
        """Return the facts about every device."""
        result: list[DeviceFacts] = ray.get(self.workers.call("facts", self.job, declared_fields(self.job.data)))
        return result

    def check_room(self, room: float) -> None:
        """Check that the measured layers fit a device with ``room`` bytes.

        Raises:
            SpecError: they do not; the error names the largest layer.
        """
        need = {i: self._state_bytes(i) for i in self.measured}
        if sum(need.values()) > room:
            largest = max(need, key=lambda i: need[i])
            raise SpecError(
                "model",
                f"layers {', '.join(self.model.names[i] for i in self.measured)} with gradients and optimizer state "
                f"take {_gib(sum(need.values()))} ({self.model.names[largest]} alone {_gib(need[largest])}), but a "
                f"device has {_gib(room)}",
                "profile on devices with more memory, on fewer devices per host, or a smaller model",
            )

    def _state_bytes(self, layer: int) -> float:
        """Bytes of a layer's parameters, with gradients and optimizer state of those that are trained."""
        train = self.job.train
        each = parameter_bytes(train.dtype, train.optimizer, train.momentum)
        return each.held(self.model.parameters(layer), self.model.trained_parameters(layer))

    def fits(self, size: int, room: float) -> bool:
        """Return whether the activations of micro-batches of ``size`` fit, as far as known from a smaller size."""
        weights = sum(map(self._state_bytes, self.measured))
        alive = (
            ALIVE * size * sum(max(t[self.groups[i]] / n for n, t in self.grown["F"].items()) for i in self.measured)
        )
        return weights + 1.5 * alive <= room  # a task's temporaries beside what it keeps

    def measure(self, size: int, effort: Effort, memory: bool, alone: bool = False) -> None:
        """Measure the times of every task at one micro-batch size.

        Args:
            size: samples of a micro-batch.
            effort: how often to measure.
            memory: whether to measure the memory that layers keep, too.
            alone: whether to compare with a device whose host's other devices are idle.
        """
        result: dict[Way, list[Samples]] = {}
        effort, first = self._effort(effort), not self.passes
        for way in WAYS:
            if way == "recompute" and effort.once:
                continue  # a forward is the same work
            if way == "recompute" and self.job.train.compile != "inductor":  # uses the modules built for joint
                result[way] = self._run(size, way, 0, effort, False)
            else:  # a compiled stage has programs for the tasks of one way
                self._hold(size, self._step(size, way))
                # Memory use becomes steady later than times, so it needs one more warm-up step.
                more = first and way == "joint" if effort.once else memory
                result[way] = self._run(size, way, effort.warm_up + more, effort, memory)
            if alone and way == "joint":
                self.alone = self._alone(size, effort)
        for what, way, kind, since, until in MEMORY if memory else ():
            self.grown[what][size] = grown_bytes(result[way], kind, self.groups, since, until)
        if memory and self.job.train.dtype == "bfloat16":
            self.casts[size] = cast_bytes(result["joint"], self.groups)
        self.passes[size].append(Pass.of(result))

    def _effort(self, effort: Effort) -> Effort:
        """Return the effort that these layers need of what is allowed."""
        return one_step(effort) if self.long else effort

    def sample_seconds(self, size: int) -> float:
        """Return how long it took to measure a size once it was warm, per sample: what another size will take."""
        spans = [one.times[-1, :, 1].max() - one.times[0, :, 0].min() for one in self._counted(size)[0].found["joint"]]
        return float(max(spans)) * len(self._counted(size)[0].found) / size

    def step_seconds(self, size: int) -> float:
        """Estimate a step of the job on all devices from one measured micro-batch size, as evenly divided work."""
        taken = self._taken(size)
        each = sum(taken[task, kind].seconds for kind in self.groups for task in ("F", BW))
        return each / size * self.job.train.batch / len(self.workers.actors)

    def forget(self, size: int) -> None:
        """Discard the times measured so far, because the machine's speed has changed."""
        self.passes[size].clear()

    @property
    def stolen(self) -> dict[int, float]:
        """Per micro-batch size, the share of the used passes' time in which other processes had a core."""
        return {size: max(one.stolen for one in self._counted(size)) for size in self.passes}

    def _counted(self, size: int) -> list[Pass]:
        """Return the undisturbed passes, or the least disturbed one if there are none."""
        passes = self.passes[size]
        quiet = [one for one in passes if one.stolen <= LIMIT]
        return quiet or [min(passes, key=lambda one: one.stolen)]

    def _taken(self, size: int) -> dict[tuple[Kind, int], Taken]:
        """Return the times by kind of task and kind of layer."""

        def found(way: Way) -> dict[tuple[Kind, int], Taken]:
            return task_times([one for counted in self._counted(size) for one in counted.found[way]], self.groups)

        times = found("joint")
        if all("recompute" in one.found for one in self._counted(size)):
            times |= {key: t for key, t in found("recompute").items() if key[0] == "R"}
        else:
            times |= {("R", kind): t for (task, kind), t in times.items() if task == "F"}
        return times | {key: t for key, t in found("split").items() if key[0] in ("B", "W")}

    def _joint(self) -> list[list[Samples]]:
        """Return, for every size and every used pass, each device's samples with a joint backward."""
        return [one.found["joint"] for size in self.passes for one in self._counted(size)]

    def _alone(self, size: int, effort: Effort) -> float:
        """Measure the first device's time while all others wait, over its time while all work.

        The two measurements alternate, because the difference is a few percent and a machine's speed varies as much.
        """
        effort = self._effort(effort)
        program = self._program(size, "joint")
        shares = []
        for _ in range(effort.pairs):
            by_itself: Samples = ray.get(self.workers.actors[0].run_layers.remote(program, 0, effort, False))
            beside = self._run(size, "joint", 0, effort, False)[:1]
            # With one device at work, the host's daemons run on other cores; ``charge`` includes that effect.
            shares.append(charge([by_itself]) * self._seconds([by_itself]) / (charge(beside) * self._seconds(beside)))
        return min(1.0, median(shares))

    def _seconds(self, found: list[Samples]) -> float:
        """Return the undisturbed seconds of one micro-batch's F and BW through one layer of every kind."""
        times = task_times(found, self.groups)
        return sum(taken.seconds for (task, _), taken in times.items() if task in ("F", BW))

    def probe(self, size: int, effort: Effort) -> float:
        """Measure the seconds of one micro-batch's F and BW through one layer of every kind."""
        result = self._recompute(size, effort)
        return charge(result) * self._seconds(result)

    def _recompute(self, size: int, effort: Effort) -> list[Samples]:
        self._hold(size, self._step(size, "joint"))
        effort = self._effort(effort)
        return self._run(size, "joint", effort.warm_up, effort, False)

    def drift(self, sizes: Iterable[int], effort: Effort) -> float:
        """Measure again and return the largest relative change of the times of these micro-batch sizes."""
        kept = {n: sum(t.seconds for (task, _), t in self._taken(n).items() if task in ("F", BW)) for n in sizes}
        return drift((seconds, self._seconds(self._recompute(n, effort))) for n, seconds in kept.items())

    def known_seconds(self, profile: Profile, size: int) -> float:
        """Return the seconds that ``probe`` should measure according to a profile of this model."""
        times = (profile.layers[kind].times[size] for kind in sorted(set(self.groups)))
        return sum(t.forward + t.joint for t in times)

    def _run(self, size: int, way: Way, warm_up: int, effort: Effort, memory: bool) -> list[Samples]:
        """Run a step on all devices at the same time; return each device's samples."""
        calls = self.workers.call("run_layers", self._program(size, way), warm_up, effort, memory)
        result: list[Samples] = ray.get(calls)
        return result

    def _step(self, size: int, way: Way) -> Schedule:
        most = ALIVE if self.long else MICROBATCHES
        return measured_step(self.model.count, self.measured, way, step_microbatches(size, self.job.train.batch, most))

    def _program(self, size: int, way: Way) -> Program:
        return programs(self._step(size, way))[0]

    def count_loads(self, size: int, room: float) -> None:
        """Have the first device run a step of micro-batches of ``size``, and count the rows of each layer's experts.

        Routers need what the layers before them make of the job's own samples, so it runs as many of the model's first
        layers as fit ``room`` bytes, or where tasks take long, as are measured. With compiled layers nothing is
        counted: no plan divides their experts.
        """
        if self.interrupted or self.job.train.compile == "inductor" or not any(w.experts for w in self._works()):
            return
        first = range(self.model.count) if not self.long else takewhile(lambda i: i in self.measured, count())
        layers: list[int] = []
        for i in first:
            room -= self._state_bytes(i) + 1.5 * ALIVE * self.grown["F"][size][self.groups[i]]
            if room < 0:
                break
            layers.append(i)
        step = measured_step(self.model.count, layers, "joint", ALIVE)
        self._hold(size, step, devices=1)
        self.loads = ray.get(self.workers.actors[0].expert_loads.remote(programs(step)[0]))

    def _hold(self, size: int, step: Schedule, devices: int | None = None) -> None:
        model, job = self.model, self.job
        cut = tuple((i,) for i in range(model.count))
        setup = Setup(
            device=0,
            tensor_rank=0,
            job=job.model_copy(
                update={
                    "train": job.train.model_copy(update={"batch": size * step.microbatches}),
                    "data": job.data.model_copy(update={"pad_to_multiple_of": LONGEST}),
                }
            ),
            # Each device measures by itself.
            parallel=job.parallel.model_copy(update={"replicas": 1, "experts": 1, "context": 1}),
            cut=cut,
            graph=step.graph,
            placement=step.placement,
            topology=Topology(
                peers=(self.workers.locations[0].peer,),
                rendezvous="",
                edges=(),
                groups={},
                transport="auto",
                run_id=self.workers.run_id,
            ),
            tied=(),
            samples_per_microbatch=size,
            microbatches=step.microbatches,
            versions="flush",
            train={WHOLE: programs(step)[0]},
            evaluate=programs(step)[0],
            data=self.data,
            fields=known_fields(self.data),
            checkpoint=None,
        )
        peers = [location.peer for location in self.workers.locations]
        held: list[tuple[dict[str, int], dict[int, int]]] = ray.get(
            [
                actor.hold.remote(replace(setup, topology=replace(setup.topology, peers=(replace(peer, rank=0),))))
                for actor, peer in list(zip(self.workers.actors, peers, strict=True))[:devices]
            ]
        )
        sizes, operands = held[0]
        self.sizes |= sizes
        if operands:
            self.grown["operands"][size] = {self.groups[i]: float(n) for i, n in operands.items()}

    def _works(self) -> list[LayerWork]:
        """Return the work of each layer, as its operations say."""
        on_cpu = self.workers.locations[0].peer.device == "cpu"
        return [rank.work for rank in tensor_ranks_of(self.job, self.model, ON_CPU if on_cpu else ON_GPU)]

    def profiles(self) -> tuple[LayerProfile, ...]:
        """Return the profiles of all layers of the model; layers of one kind share all figures but experts' loads."""
        taken, longer = {size: self._taken(size) for size in self.passes}, self._charge()
        works = self._works()
        compiled = self.job.train.compile == "inductor"  # whose own graphs say what is kept
        unread = [0.0 if compiled else work.unread_input_bytes for work in works]
        return tuple(
            self._profile(i, kind, taken, longer, unread[i]).model_copy(
                update={
                    **_attention(works[i]),
                    "matrices": works[i].matrices if self.job.train.optimizer == "muon" else (),
                    "experts": _experts(works[i], self._loads(i)),
                }
            )
            for i, kind in enumerate(self.groups)
        )

    def _loads(self, layer: int) -> list[int]:
        """Return the rows of a layer's experts; of the last that was counted before, where it was not."""
        before = [i for i in self.loads if i <= layer]
        return self.loads[max(before)] if before else []

    def _charge(self) -> float:
        """Return ``charge`` over all used passes."""
        counted = (one for size in self.passes for one in self._counted(size))
        return charge(one for result in counted for samples in result.found.values() for one in samples)

    def _profile(
        self, i: int, kind: int, taken: dict[int, dict[tuple[Kind, int], Taken]], longer: float, unread: float
    ) -> LayerProfile:
        def times(size: int) -> TaskTimes:
            result = taken[size]
            f, b, w, bw, r = (longer * result[task, kind].seconds for task in ("F", "B", "W", BW, "R"))
            return TaskTimes(
                forward=f, input_grad=b, weight_grad=w, joint=bw, recompute=r, spread=result["F", kind].spread
            )

        def memory(what: str, cross: float = 0.0) -> tuple[float, float]:
            by_size = {size: max(0.0, of[kind] + size * cross) for size, of in self.grown[what].items()}
            return fixed_and_each(list(by_size), list(by_size.values()))

        # Memory grows by a forward's output, but a layer's figure counts its kept input instead of its output. As a
        # stage of its own it is measured with an input that it would not keep behind other layers.
        kept_fixed, kept = memory("F", self._crossing(i - 1) - unread - self._crossing(i))
        fixed, each = memory(BW)
        operands = next(iter(self.grown["operands"].values()), {})
        return LayerProfile(
            name=self.model.names[i],
            parameters=self.model.parameters(i),
            trained_parameters=self.model.trained_parameters(i),
            times={size: times(size) for size in sorted(taken)},
            kept_bytes=kept,
            unread_input_bytes=unread,
            kept_fixed_bytes=kept_fixed,
            cast_bytes=median(casts[kind] for casts in self.casts.values()) if self.casts else 0.0,
            waiting_bytes=memory("W")[1],
            read_bytes=self._read(i),
            output_bytes=self._crossing(i),
            output_floats=self._crossing(i, floating=True),
            workspace_bytes=each,
            workspace_fixed_bytes=fixed,
            split_workspace_bytes=memory("B")[1],
            operand_bytes=memory("operands")[1] if kind in operands else None,
        )

    def _read(self, i: int) -> float:
        """Return the bytes of one sample's raw inputs that a layer reads from arrays."""
        fields = declared_fields(self.job.data) or {}
        reads = self.model.reads((i,)) | (self.model.task.reads if i == self.model.count - 1 else frozenset())
        return float(sum(TensorSpec(fields[n].shape, fields[n].dtype).nbytes for n in reads if n in fields))

    def _crossing(self, i: int, floating: bool = False) -> float:
        """Return the bytes of one sample that cross a cut after a layer; 0 before the first and after the last layer.

        ``floating`` counts only floating-point tensors.
        """
        if not 0 <= i < self.model.count - 1:
            return 0.0
        crossing = self.model.crossing(i, 1)
        counted = [t for t in crossing if t.dtype.is_floating_point or not floating]
        return float(sum(TensorSpec(t.shape, t.dtype).nbytes for t in counted))

    def code_bytes(self) -> float:
        """Return the bytes that kernels keep for the shapes of one micro-batch size, since a run has only one."""
        left: list[int] = ray.get(self.workers.call("left_behind_bytes"))
        return float(median(left)) / len(self.passes)

    def update_s_per_parameter(self) -> float:
        """Return the seconds per trained parameter element of norm, clipping and optimizer step."""
        values = sum(self.model.trained_parameters(i) for i in self.measured)
        return self._charge() * median(map(update_seconds, self._joint())) / values if values else 0.0

    def overhead_seconds(self) -> float:
        """Return the median seconds between two tasks of a device."""
        return median(overhead_seconds(result, self.measured) for result in self._joint())

    def tied_parameters(self, trained: bool = False) -> int:
        """Return the number of parameter elements that layers count beyond once, because they are tied.

        ``trained``: only of those that are trained.
        """
        groups = [group for group in self.model.tied if not trained or self.model.is_trained(group.name)]
        holders = [(group, {layer for layer, _ in group.parameters}) for group in groups]
        return sum((len(layers) - 1) * self.sizes.get(group.name, 0) for group, layers in holders)


def _attention(work: LayerWork) -> dict[str, float]:
    """Return what slices of a sequence make of a layer: attention by its share of the operations, not of the time."""
    return {
        "attention_share": work.forward.attention_operations,
        "attention_grad_share": work.input_grad.attention_operations,
        "key_value_bytes": work.key_value_bytes,
    }


def _experts(work: LayerWork, rows: Sequence[int]) -> ExpertsProfile | None:
    """Return what of a layer belongs to its experts: shares of the operations, not of the time, and measured loads."""
    own = work.experts
    if own is None:
        return None
    mean = sum(rows) / own.experts if len(rows) == own.experts else 0.0
    return ExpertsProfile(
        work=own,
        forward=grouped_share(work.forward),
        input_grad=grouped_share(work.input_grad),
        weight_grad=grouped_share(work.weight_grad),
        loads=tuple(n / mean for n in rows) if mean else (),
    )


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
