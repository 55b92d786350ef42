"""Emulate a schedule end to end: start the emulated devices, run steps, and compare them with the prediction."""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, groupby, pairwise
from statistics import median
from types import MappingProxyType
from typing import Any

import ray

from raypipe.errors import ScheduleError, SpecError
from raypipe.plan.online.measured_steps import StepClock, as_run
from raypipe.plan.online.recorded_steps import RecordedSteps, StepWaits
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.driver import QUEUED_CALLS
from raypipe.runtime.emulation.device_processes import DeviceProcesses
from raypipe.runtime.emulation.emulated_worker import NO_FAULTS, DeviceFaults, EmulatedSetup, Routing
from raypipe.runtime.emulation.links import Links, with_links
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.host_check import check_hosts
from raypipe.runtime.hosts.rank_order import located_bundles
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.setup.communicators import Topology, rendezvous_of
from raypipe.runtime.worker.worker_group import WorkerGroup, device_title
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule, StageGraph, Task, Versions
from raypipe.schedule.kinds import EXCHANGES, NETWORK
from raypipe.schedule.lowering.asynchronous import WHOLE, Part, parts
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.programs import edges, step_programs
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.sharding import dividing_group, same_shard_group, shard_members, stage_group, sum_groups
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.series import series, steady
from raypipe.simulate.timeline import Timeline

PROCESS_BYTES = 10e6
"""Memory of a device's process that it does not share with the others: 6 MB, measured with 128 of them."""
SHARED_BYTES = 400e6
"""Memory of a node's actor, and of what its devices' processes share."""
RESERVED_S = 120.0
"""Time that the resources of emulated devices have to become free."""
LONGEST_S = 86400.0
"""Longest emulation: a day."""
MOST_TASKS = 5_000_000
"""Largest number of tasks over all steps; the prediction keeps every message in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The emulated step over all devices, and its costs in seconds."""

    schedule: Schedule
    costs: CostTable
    """Costs of tasks and messages; ``comm`` is only the latency, and ``seconds_per_message`` the transfer time."""
    copies: int
    seconds_per_message: float = 0.0
    norm: NormPolicy = "none"
    clip_every: int = 0
    skew: float = 1.0

    def step_ends(self, steps: int) -> tuple[float, ...]:
        """Predict when each of the first ``steps`` steps ends, in seconds."""
        return series(self.schedule, self.costs, steps, self.seconds_per_message, self.norm)

    def steady_s(self) -> float:
        """Predict the time per step in the long run, in seconds."""
        return steady(self.schedule, self.costs, self.seconds_per_message, self.norm)


def rehearsal(
    base: Schedule,
    costs: CostTable,
    links: Links,
    replicas: int,
    norm: NormPolicy = "none",
    clip_every: int = 0,
    skew: float = 1.0,
) -> Rehearsal:
    """Make the step of ``replicas`` data-parallel copies of ``base``.

    Stages with several holders all-reduce their gradients as late as possible (lazily), then update. Of a sharded
    schedule (``passes.shard``) the copies divide what its levels say; all of them divide the experts of one whose
    all-to-all are tasks (``passes.divide_experts``). The arguments are those of ``emulate``.

    Raises:
        ScheduleError: the schedule cannot run, or its updates cannot wait for a norm.
    """
    schedule = add_updates(place_gradient_sync(replicate(as_run(base), replicas), "lazy", costs))
    if base.rules.experts and base.exchange == (1, 1):
        schedule = replace(schedule, exchange=(replicas, replicas))
    verify(schedule)
    if norm not in NORMS[schedule.versions]:
        raise ScheduleError("norm", f"{schedule.name}'s updates wait for none", "use none, or with 2BW optimistic")
    if links.per_host and schedule.graph != StageGraph.chain(schedule.stages):
        raise ScheduleError("per_host", "which links are used is known for chains of stages only", "leave it out")
    copies = schedule.exchange[1]
    if skew != 1.0 and not 1.0 <= skew <= copies:
        why = f"the busiest of {copies} copies that divide experts cannot get {skew:g} times the mean of the tokens"
        raise ScheduleError("skew", why, f"give a number from 1 to {copies}")
    return Rehearsal(
        schedule=schedule,
        costs=with_links(_of_busiest(costs, schedule.rules.experts, skew), links, schedule, base.placement, replicas),
        copies=replicas,
        seconds_per_message=0.0 if links.per_host else links.seconds_per_message,
        norm=norm,
        clip_every=clip_every if schedule.versions == "flush" else 0,
        skew=skew,
    )


def _of_busiest(costs: CostTable, experts: Collection[int], skew: float) -> CostTable:
    """Return the costs where the busiest copy gets ``skew`` times the mean of the tokens, for which all others wait."""
    names = ("forward", "input_grad", "weight_grad", "dispatch", "combine")
    rows: dict[str, Any] = {
        name: tuple(t * skew if s in experts else t for s, t in enumerate(getattr(costs, name))) for name in names
    }
    return replace(costs, **rows)


NO_FAULTS_ANYWHERE: Mapping[int, DeviceFaults] = MappingProxyType({})

NORMS: dict[Versions, tuple[NormPolicy, ...]] = {
    "flush": ("none", "wait", "optimistic"),
    "2bw": ("none", "optimistic"),
    "stash": ("none",),
}
"""By weight versions, how updates can depend on the global gradient norm."""


@dataclass(frozen=True, slots=True)
class Emulated:
    """The results of an emulation, in seconds."""

    predicted_s: float
    """Predicted time per step in the long run."""
    predicted_steps_s: list[float]
    """Predicted time of each step; the first includes the fill, the last the drain."""
    measured_s: list[float]
    """Measured time of each step, from the end of the one before; the first from its own start."""
    bubble_ratio: float
    """Idle share of all devices over a median step."""
    dispatch_overhead_s: float
    """Median of measured minus predicted step time, without the first step."""
    timeline: Timeline
    """The last step as measured."""
    recorded: RecordedSteps | None = None
    """The newest steps, for what explains them."""


def emulate(
    base: Schedule,
    costs: CostTable,
    links: Links,
    steps: int,
    replicas: int,
    norm: NormPolicy = "none",
    clip_every: int = 0,
    skew: float = 1.0,
) -> Emulated:
    """Run ``steps`` steps of ``replicas`` data-parallel copies of ``base`` on emulated devices.

    Args:
        base: schedule of one copy.
        costs: cost table in seconds.
        links: the emulated network.
        steps: number of steps.
        replicas: number of data-parallel copies.
        norm: how updates depend on the global gradient norm. With ``wait`` it is a barrier between steps; otherwise
            steps follow one another without one.
        clip_every: with ``norm="optimistic"``, the update of every ``clip_every``-th step is undone and the forwards
            since then run again, which the prediction leaves out; 0 for never.
        skew: where copies divide experts, the tokens of the busiest one as a multiple of the mean; in each step another
            copy is the busiest.

    Raises:
        ScheduleError: the schedule cannot run, its updates cannot wait for a norm, or no copy gets so many tokens.
        SpecError: there is not enough memory for so many devices, or there are too many steps to predict.
        ClusterError: the nodes cannot work together.
    """
    what = rehearsal(base, costs, links, replicas, norm, clip_every, skew)
    _check_length(what, steps)
    request = connect(what.schedule.devices, emulated=True)
    check_processes(what.schedule.devices, ray.cluster_resources().get("memory", math.inf))
    titles = [device_title(what.schedule, device, replicas) for device in range(what.schedule.devices)]
    workers = start_emulated_devices(titles, request)
    try:
        return run_rehearsal(what, workers, steps)
    finally:
        workers.stop()


def check_processes(devices: int, memory_bytes: float) -> None:
    """Check that the processes of the emulated devices fit into Ray's memory.

    Raises:
        SpecError: they do not.
    """
    most = int(max(0.0, memory_bytes - SHARED_BYTES) / PROCESS_BYTES) if memory_bytes < math.inf else devices
    if devices > most:
        needed = SHARED_BYTES + devices * PROCESS_BYTES
        raise SpecError(
            "devices",
            f"{devices} emulated devices are as many processes and need about {needed / 1e9:.1f} GB; "
            f"Ray has {memory_bytes / 1e9:.1f}",
            f"use at most {most}, or raypipe schedule, which starts no processes",
        )


def _check_length(what: Rehearsal, steps: int) -> None:
    """Check that the steps can be predicted, and take no longer than ``LONGEST_S``.

    Raises:
        SpecError: they cannot.
    """
    tasks = sum(map(len, what.schedule.orders))
    most = max(1, MOST_TASKS // max(1, tasks))
    if steps > most:
        raise SpecError("steps", f"{steps} steps of {tasks} tasks are too many to predict", f"use at most {most}")
    if not what.step_ends(1)[0] * steps <= LONGEST_S:  # a step's end may be infinite
        why = f"{steps} steps would take longer than {LONGEST_S:g} s, and they really take that time"
        raise SpecError("steps", why, "use shorter times, smaller messages or fewer steps")


def run_rehearsal(
    what: Rehearsal, workers: WorkerGroup, steps: int, faults: Mapping[int, DeviceFaults] = NO_FAULTS_ANYWHERE
) -> Emulated:
    """Emulate on running workers, one per device.

    ``faults``: by device, what goes wrong there, which the prediction leaves out.
    """
    schedule = what.schedule
    clock = StepClock(schedule)
    check_hosts(workers.actors, workers.locations)
    _setup(workers, what, faults)
    waits = StepWaits(data_s=tuple(faults.get(d, NO_FAULTS).data_s for d in range(schedule.devices)))
    measured = _steps(workers, clock, schedule, steps, waits)
    ends = what.step_ends(steps)
    predicted = [end - begin for begin, end in pairwise((0.0, *ends))]
    last = clock.measured()
    assert last is not None
    busy = sum(simulate(schedule, what.costs).busy)
    over = [m - p for m, p in zip(measured, predicted, strict=True)]
    return Emulated(
        predicted_s=what.steady_s() if steps > 1 else ends[0],
        predicted_steps_s=predicted,
        measured_s=measured,
        bubble_ratio=1.0 - busy / (schedule.devices * median(measured[1:] or measured)),
        dispatch_overhead_s=median(over[1:] or over),
        timeline=last,
        recorded=clock.recorded,
    )


def _setup(workers: WorkerGroup, what: Rehearsal, faults: Mapping[int, DeviceFaults]) -> None:
    schedule, costs = what.schedule, what.costs
    exchanging = exchanging_devices(schedule)
    topology = Topology(
        peers=tuple(x.peer for x in workers.locations),
        rendezvous=rendezvous_of(workers.locations),
        edges=edges(schedule),
        groups=sum_groups(schedule.placement, schedule.sharding)
        | {_exchange_group(devices): devices for devices in exchanging.values() if len(devices) > 1},
        transport="auto",
        run_id=workers.run_id,
    )
    ways = parts(schedule)
    lowered = step_programs(schedule, ahead=what.norm == "optimistic", exchanges=True)
    waits = collective_waits(schedule)
    groups = {part: collective_groups(one, topology.groups) for part, one in ways.items()}
    times = {part: [tuple(costs.durations(one, list(order))) for order in one.orders] for part, one in ways.items()}
    places = [
        {key: (devices.index(rank), len(devices)) for key, devices in exchanging.items() if rank in devices}
        for rank in range(schedule.devices)
    ]
    setups = [
        EmulatedSetup(
            rank=rank,
            topology=topology,
            microbatches=schedule.microbatches,
            programs={part: rows[rank] for part, rows in lowered.items()},
            durations={part: rows[rank] for part, rows in times.items()},
            latency_s=costs.comm,
            seconds_per_message=what.seconds_per_message,
            waits=waits[rank],
            groups={part: rows[rank] for part, rows in groups.items()},
            norm=what.norm,
            clip_every=what.clip_every,
            faults=faults.get(rank, NO_FAULTS),
            routing=Routing(places[rank], what.skew),
        )
        for rank in range(len(workers.actors))
    ]
    ray.get(workers.call_each("setup", [(one,) for one in setups]))


Experts = dict[tuple[int, int], tuple[int, ...]]
"""(stage of experts, replica) -> the devices that divide them."""


def exchanging_devices(schedule: Schedule) -> Experts:
    """Return which devices divide the experts of each stage replica that holds some."""
    copies, together = schedule.exchange
    of_copy = schedule.replicas // copies
    result: Experts = {}
    for replica in range(schedule.replicas):
        first = replica // of_copy // together * together
        rows = [schedule.placement[(first + n) * of_copy + replica % of_copy] for n in range(together)]
        result |= {(s, replica): tuple(row[s] for row in rows) for s in schedule.rules.experts}
    return result


def _exchange_group(devices: Sequence[int]) -> str:
    return f"experts of {' '.join(map(str, devices))}"


def collective_groups(schedule: Schedule, groups: Collection[str]) -> list[tuple[str, ...]]:
    """Return per device and action the name of the process group of a collective; nothing if it has one member."""
    members = shard_members(schedule.sharding, schedule.placement)
    exchanging = exchanging_devices(schedule)

    def group(task: Task) -> str:
        if task.kind not in NETWORK:
            return ""
        if task.kind in EXCHANGES:
            name = _exchange_group(exchanging[task.stage, task.replica])
            return name if name in groups else ""
        member = members.get((task.stage, task.replica))
        if member is None or len(member.group) == 1:
            name = stage_group(task.stage)
        else:
            name = (same_shard_group if task.kind == "AR" else dividing_group)(task.stage, member)
        return name if name in groups else ""

    return [tuple(map(group, order)) for order in schedule.orders]


def collective_waits(schedule: Schedule) -> list[tuple[tuple[int, ...], ...]]:
    """Return per device and action the collectives of the device that a computation waits for."""
    if schedule.sharding is None and not schedule.rules.experts:
        return [()] * schedule.devices
    graph = link(schedule)

    def waits(i: int, first: int) -> tuple[int, ...]:
        preds = graph.preds[i] if graph.tasks[i].mbs else ()
        return tuple(p - first for p in preds if graph.tasks[p].kind in NETWORK)

    return [tuple(waits(i, first) for i in range(first, end)) for first, end in pairwise(graph.first)]


def _steps(workers: WorkerGroup, clock: StepClock, schedule: Schedule, steps: int, waits: StepWaits) -> list[float]:
    measured: list[float] = []
    pending: deque[tuple[Part, list[Any]]] = deque()

    def collect() -> None:
        part, refs = pending.popleft()
        times, messages = zip(*ray.get(refs), strict=True)
        of_step = replace(waits, message_s=messages)
        measured.append(clock.add(part, list(times), of_step, len(measured) + 1)[0])

    for step in range(steps):
        part = WHOLE if schedule.versions == "flush" else (step == 0, step == steps - 1)
        pending.append((part, workers.call("run_step", step, part)))
        if len(pending) > QUEUED_CALLS:
            collect()
    while pending:
        collect()
    return measured


# Start emulated devices: one actor per node, which has a process of its own for each device there.


@dataclass(frozen=True, slots=True)
class _Call:
    """A method of a device's worker, called as one of an actor's."""

    remote: Callable[..., Any]


class EmulatedNode:
    """The actor of the devices of one node."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._turns = count()

    def calls(self, requests: Sequence[tuple[int, bytes]]) -> list[Any]:
        """See DeviceProcesses.calls; return one reference per request."""
        refs = self.actor.calls.options(num_returns=len(requests)).remote(next(self._turns), requests)
        return refs if len(requests) > 1 else [refs]


class EmulatedDevice:
    """The handle of one device, used as that of an actor of its own; calls run one after another."""

    def __init__(self, node: EmulatedNode, number: int) -> None:
        self.node, self.number = node, number

    def __getattr__(self, method: str) -> _Call:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Call(partial(self._call, method))

    def _call(self, method: str, *arguments: object) -> Any:
        return self.node.calls([(self.number, pickle.dumps((method, arguments)))])[0]


@dataclass(slots=True)
class EmulatedDevices(WorkerGroup):
    """The running emulated devices of one run; ``actors`` are their handles."""

    nodes: list[Any] = field(default_factory=list)
    """Ray's actors, one per node."""

    def processes(self) -> list[Any]:
        """See WorkerGroup.processes."""
        return self.nodes

    def call(self, method: str, *args: object) -> list[Any]:
        """See WorkerGroup.call."""
        return self._calls([pickle.dumps((method, args))] * len(self.actors))

    def call_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """See WorkerGroup.call_each."""
        return self._calls([pickle.dumps((method, args)) for args in arguments])

    def _calls(self, requests: Sequence[bytes]) -> list[Any]:
        """Send each device its request, with one call per node: a hundred calls would take Ray a second of CPU time."""
        refs: list[Any] = []
        pairs = zip(self.actors, requests, strict=True)
        for _, result in groupby(pairs, key=lambda pair: id(pair[0].node)):  # a node's ranks follow one another
            together = list(result)
            refs += together[0][0].node.calls([(device.number, request) for device, request in together])
        self.calls.extend(refs)
        return refs


def start_emulated_devices(titles: list[str], request: DeviceRequest) -> EmulatedDevices:
    """Reserve ``request`` for each title, and start a process with an ``EmulatedWorker`` for it, by rank.

    Raises:
        DevicesError: the resources were not free within ``RESERVED_S``.
    """
    place = reserve(len(titles), request, RESERVED_S)
    devices = EmulatedDevices([], titles, [], place.run_id, place)
    try:
        at = located_bundles((part.group for part in place.parts), 0.0, place.kinds)
        for _, result in groupby(range(len(titles)), key=lambda rank: at[rank].node):
            ranks = list(result)
            workers = [(rank, titles[rank], at[rank].node, at[rank].address) for rank in ranks]
            node = (
                ray.remote(DeviceProcesses)
                .options(
                    name=f"{len(ranks)} emulated devices · {place.run_id}",
                    scheduling_strategy=place.strategy(at[ranks[0]].number),
                    num_cpus=request.cpus,
                    max_restarts=0,
                )
                .remote(workers)
            )
            devices.nodes.append(node)
            shared = EmulatedNode(node)
            devices.actors += [EmulatedDevice(shared, number) for number in range(len(ranks))]
        devices.locate()
    except BaseException:
        devices.stop()  # the caller has no group yet that it could stop
        raise
    return devices
