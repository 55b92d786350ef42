"""Measure every kind of layer on all devices at once, one micro-batch size after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import ray

from raypipe.cost.memory import parameter_bytes
from raypipe.cost.noise import LIMIT
from raypipe.cost.profile import LayerProfile, Profile, TaskTimes
from raypipe.data import declared_fields, known_fields
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel
from raypipe.profiling.disturbances import charge, drift, stolen
from raypipe.profiling.effort import Effort
from raypipe.profiling.profiled_steps import (
    AFTER,
    ALIVE,
    BEFORE,
    WORST,
    Samples,
    Taken,
    Way,
    alike,
    cast_bytes,
    fixed_and_each,
    grown_bytes,
    measured_layers,
    measured_step,
    overhead_seconds,
    step_microbatches,
    task_times,
    update_seconds,
)
from raypipe.profiling.profiling_worker import DeviceFacts
from raypipe.runtime.cluster.worker_group import WorkerGroup
from raypipe.runtime.communicators import Topology
from raypipe.runtime.setup import Setup
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import Kind
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Program, programs

LONGEST = 1 << 40
"""More than any sample holds: where they have their own lengths, all are measured as long as the longest."""
MEMORY: tuple[tuple[str, Way, Kind, int, int], ...] = (
    ("F", "joint", "F", BEFORE, AFTER),
    ("BW", "joint", "BW", BEFORE, WORST),
    ("B", "split", "B", BEFORE, WORST),
    ("W", "split", "W", AFTER, BEFORE),
)
"""What memory is looked at: its name, in which step, of which task, from when to when."""
WAYS: tuple[Way, ...] = ("joint", "recompute", "split")


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch size, measured in every way once."""

    found: dict[Way, list[Samples]]
    """Of each device."""
    stolen: float
    """Share of its tasks' time in which other processes had the core."""

    @staticmethod
    def of(found: dict[Way, list[Samples]]) -> Pass:
        """With what was stolen from it."""
        return Pass(found, max(map(stolen, found.values())))


@dataclass(slots=True)
class LayerBench:
    """The layers of a model, on devices that measure them."""

    job: JobSpec
    model: LayeredModel
    workers: WorkerGroup
    data: Path
    """Folder of the prepared data."""
    groups: list[int] = field(init=False)
    """Per layer, the first one like it."""
    here: list[int] = field(init=False)
    """Layers that are built and measured."""
    passes: dict[int, list[Pass]] = field(default_factory=lambda: defaultdict(list))
    """By micro-batch size."""
    grown: dict[str, dict[int, dict[int, float]]] = field(default_factory=lambda: defaultdict(dict))
    """Bytes by what of, micro-batch size and kind of layer."""
    casts: dict[int, dict[int, float]] = field(default_factory=dict)
    """Bytes of autocast's copies of the weights, by micro-batch size and kind of layer."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Values of each parameter that is built, by name."""
    alone: float = 1.0
    """Time of a task on a device whose host's others are idle, over its time when all of them are at work."""

    def __post_init__(self) -> None:
        self.groups = alike(self.model)
        self.here = measured_layers(self.groups)

    def facts(self) -> list[DeviceFacts]:
        """What the devices say of themselves."""
        found: list[DeviceFacts] = ray.get(self.workers.call("facts", self.job, declared_fields(self.job.data)))
        return found

    def check_room(self, room: float) -> None:
        """Refuse a model of which one layer of each kind does not fit a device with ``room`` bytes.

        Raises:
            SpecError: naming the largest layer.
        """
        need = {i: self._state_bytes(i) for i in self.here}
        if sum(need.values()) > room:
            largest = max(need, key=lambda i: need[i])
            raise SpecError(
                "model",
                f"layers {', '.join(self.model.names[i] for i in self.here)} with gradients and optimizer state take "
                f"{_gib(sum(need.values()))} ({self.model.names[largest]} alone {_gib(need[largest])}), a device has "
                f"{_gib(room)}",
                "profile on devices with more memory, or fewer of them a host, or a smaller model",
            )

    def _state_bytes(self, layer: int) -> float:
        """Bytes of a layer's parameters with their gradients and optimizer state."""
        train = self.job.train
        each = parameter_bytes(train.dtype, train.optimizer, train.momentum)
        return float(each.total * self.model.parameters(layer))

    def fits(self, size: int, room: float) -> bool:
        """Whether the activations of micro-batches of ``size`` fit, as far as known from a smaller size."""
        weights = sum(map(self._state_bytes, self.here))
        alive = ALIVE * size * sum(max(t[self.groups[i]] / n for n, t in self.grown["F"].items()) for i in self.here)
        return weights + 1.5 * alive <= room  # a task's temporaries beside what it keeps

    def measure(self, size: int, effort: Effort, memory: bool, alone: bool = False) -> None:
        """Times of every task at this micro-batch size; the ``memory`` that layers keep, too. ``alone``: compare with
        a device that has its host to itself.
        """
        found: dict[Way, list[Samples]] = {}
        for way in WAYS:
            if way == "recompute":  # the same modules as joint, and only R is new
                found[way] = self._run(size, way, 0, effort, False)
            else:
                self._hold(size, way)
                # Memory settles later than times: one step more.
                found[way] = self._run(size, way, effort.warm_up + memory, effort, memory)
            if alone and way == "joint":
                self.alone = self._alone(size, effort)
        for what, way, kind, since, until in MEMORY if memory else ():
            self.grown[what][size] = grown_bytes(found[way], kind, self.groups, since, until)
        if memory and self.job.train.dtype == "bfloat16":
            self.casts[size] = cast_bytes(found["joint"], self.groups)
        self.passes[size].append(Pass.of(found))

    def forget(self, size: int) -> None:
        """The times measured so far: the machine is another one by now."""
        self.passes[size].clear()

    @property
    def stolen(self) -> dict[int, float]:
        """By micro-batch size, the share of the counted passes' time in which other processes had a core."""
        return {size: max(one.stolen for one in self._counted(size)) for size in self.passes}

    def _counted(self, size: int) -> list[Pass]:
        """Passes that went undisturbed; if none did, the least disturbed one."""
        passes = self.passes[size]
        quiet = [one for one in passes if one.stolen <= LIMIT]
        return quiet or [min(passes, key=lambda one: one.stolen)]

    def _taken(self, size: int) -> dict[tuple[Kind, int], Taken]:
        """By kind of task and kind of layer."""

        def found(way: Way) -> dict[tuple[Kind, int], Taken]:
            return task_times([one for counted in self._counted(size) for one in counted.found[way]], self.groups)

        times = found("joint")
        times |= {key: t for key, t in found("recompute").items() if key[0] == "R"}
        return times | {key: t for key, t in found("split").items() if key[0] in ("B", "W")}

    def _joint(self) -> list[list[Samples]]:
        """Of every size and every pass that counts, the steps with a joint backward, of each device."""
        return [one.found["joint"] for size in self.passes for one in self._counted(size)]

    def _alone(self, size: int, effort: Effort) -> float:
        """The first device's time while all others wait, over its time beside them.

        The two take turns: what is looked for is a few hundredths, and a machine's speed wanders by as much.
        """
        program = self._program(size, "joint")
        shares = []
        for _ in range(effort.pairs):
            by_itself: Samples = ray.get(self.workers.actors[0].run_layers.remote(program, 0, effort, False))
            beside = self._run(size, "joint", 0, effort, False)[:1]
            # The host's daemons have a core for themselves beside the one: that is part of it.
            shares.append(charge([by_itself]) * self._seconds([by_itself]) / (charge(beside) * self._seconds(beside)))
        return min(1.0, median(shares))

    def _seconds(self, found: list[Samples]) -> float:
        """Of one micro-batch there and back, through one layer of every kind, undisturbed."""
        times = task_times(found, self.groups)
        return sum(taken.seconds for (task, _), taken in times.items() if task in ("F", "BW"))

    def probe(self, size: int, effort: Effort) -> float:
        """Seconds of one micro-batch there and back, through one layer of every kind, measured now."""
        found = self._recompute(size, effort)
        return charge(found) * self._seconds(found)

    def _recompute(self, size: int, effort: Effort) -> list[Samples]:
        self._hold(size, "joint")
        return self._run(size, "joint", effort.warm_up, effort, False)

    def drift(self, sizes: Iterable[int], effort: Effort) -> float:
        """By how much times of these micro-batch sizes differ from what was measured before."""
        kept = {n: sum(t.seconds for (task, _), t in self._taken(n).items() if task in ("F", "BW")) for n in sizes}
        return drift((seconds, self._seconds(self._recompute(n, effort))) for n, seconds in kept.items())

    def known_seconds(self, profile: Profile, size: int) -> float:
        """What ``probe`` measures, by a profile of this model."""
        times = (profile.layers[kind].times[size] for kind in sorted(set(self.groups)))
        return sum(t.forward + t.joint for t in times)

    def _run(self, size: int, way: Way, warm_up: int, effort: Effort, memory: bool) -> list[Samples]:
        """Of each device, all of them at work."""
        calls = self.workers.call("run_layers", self._program(size, way), warm_up, effort, memory)
        found: list[Samples] = ray.get(calls)
        return found

    def _step(self, size: int, way: Way) -> Schedule:
        return measured_step(self.model.count, self.here, way, step_microbatches(size, self.job.train.batch))

    def _program(self, size: int, way: Way) -> Program:
        return programs(self._step(size, way))[0]

    def _hold(self, size: int, way: Way) -> None:
        model, job = self.model, self.job
        step = self._step(size, way)
        cut = tuple((i,) for i in range(model.count))
        setup = Setup(
            device=0,
            tensor_rank=0,
            job=job.model_copy(update={
                "train": job.train.model_copy(update={"batch": size * step.microbatches}),
                "data": job.data.model_copy(update={"pad_to_multiple_of": LONGEST}),
            }),
            cut=cut,
            placement=step.placement,
            topology=Topology(peers=(self.workers.locations[0].peer,), rendezvous="", edges=(), groups={},
                          transport="auto", run_id=self.workers.run_id),
            tied=(),
            samples_per_microbatch=size,
            microbatches=step.microbatches,
            versions="flush",
            train={WHOLE: self._program(size, way)},
            evaluate=self._program(size, way),
            data=self.data,
            fields=known_fields(self.data),
            checkpoint=None,
        )  # fmt: skip
        peers = [location.peer for location in self.workers.locations]
        held = ray.get(
            [
                actor.hold.remote(replace(setup, topology=replace(setup.topology, peers=(replace(peer, rank=0),))))
                for actor, peer in zip(self.workers.actors, peers, strict=True)
            ]
        )
        self.sizes |= held[0]

    def profiles(self) -> tuple[LayerProfile, ...]:
        """All layers of the model; alike ones share their figures."""
        taken, longer = {size: self._taken(size) for size in self.passes}, self._charge()
        return tuple(self._profile(i, kind, taken, longer) for i, kind in enumerate(self.groups))

    def _charge(self) -> float:
        """Of all that counts."""
        counted = (one for size in self.passes for one in self._counted(size))
        return charge(one for found in counted for way in WAYS for one in found.found[way])

    def _profile(
        self, i: int, kind: int, taken: dict[int, dict[tuple[Kind, int], Taken]], longer: float
    ) -> LayerProfile:  # fmt: skip
        def times(size: int) -> TaskTimes:
            found = taken[size]
            f, b, w, bw, r = (longer * found[task, kind].seconds for task in ("F", "B", "W", "BW", "R"))
            return TaskTimes(
                forward=f, input_grad=b, weight_grad=w, joint=bw, recompute=r, spread=found["F", kind].spread
            )

        def memory(what: str, cross: float = 0.0) -> tuple[float, float]:
            by_size = {size: max(0.0, of[kind] + size * cross) for size, of in self.grown[what].items()}
            return fixed_and_each(list(by_size), list(by_size.values()))

        # A forward leaves its output behind, which is the next layer's to count, and keeps its input.
        kept_fixed, kept = memory("F", self._crossing(i - 1) - self._crossing(i))
        fixed, each = memory("BW")
        return LayerProfile(
            name=self.model.names[i],
            parameters=self.model.parameters(i),
            times={size: times(size) for size in taken},
            kept_bytes=kept,
            kept_fixed_bytes=kept_fixed,
            cast_bytes=median(casts[kind] for casts in self.casts.values()) if self.casts else 0.0,
            waiting_bytes=memory("W")[1],
            read_bytes=self._read(i),
            output_bytes=self._crossing(i),
            output_floats=self._crossing(i, floating=True),
            workspace_bytes=each,
            workspace_fixed_bytes=fixed,
            split_workspace_bytes=memory("B")[1],
        )

    def _read(self, i: int) -> float:
        """Bytes of one sample's raw inputs that a layer reads out of arrays."""
        fields = declared_fields(self.job.data) or {}
        reads = self.model.reads((i,)) | (self.model.task.reads if i == self.model.count - 1 else frozenset())
        return float(sum(TensorSpec(fields[n].shape, fields[n].dtype).nbytes for n in reads if n in fields))

    def _crossing(self, i: int, floating: bool = False) -> float:
        """Bytes of one sample that cross a cut behind a layer; 0 before the first and behind the last.

        ``floating``: only of floating-point tensors.
        """
        if not 0 <= i < self.model.count - 1:
            return 0.0
        crossing = self.model.crossing(i, 1)
        counted = [t for t in crossing if t.dtype.is_floating_point or not floating]
        return float(sum(TensorSpec(t.shape, t.dtype).nbytes for t in counted))

    def code_bytes(self) -> float:
        """What kernels keep for the shapes of one micro-batch size; a run has one size."""
        left: list[int] = ray.get(self.workers.call("left_behind_bytes"))
        return float(median(left)) / len(self.passes)

    def update_s_per_parameter(self) -> float:
        """Norm, clipping and optimizer, of each value."""
        values = sum(self.model.parameters(i) for i in self.here)
        return self._charge() * median(map(update_seconds, self._joint())) / values if values else 0.0

    def overhead_seconds(self) -> float:
        """Between two tasks of a device."""
        return median(overhead_seconds(found, self.here) for found in self._joint())

    def tied_parameters(self) -> int:
        """Values that are counted in more than one layer."""
        holders = [(group, {layer for layer, _ in group.parameters}) for group in self.model.tied]
        return sum((len(layers) - 1) * self.sizes.get(group.name, 0) for group, layers in holders)


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
