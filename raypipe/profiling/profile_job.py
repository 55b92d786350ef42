"""Measure a profile: the costs of a model's layers, the optimizer and the links on the devices that will train it.

All devices measure at the same time, because stages on one host share memory bandwidth and caches and slow each other
down. Times come from the executor used in training, in workers set up as for training.
"""

from __future__ import annotations

import math
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import ray

from raypipe.cost.collectives import Kind, Timed, TimedCollective, fit, fit_link
from raypipe.cost.hosts import Hosts, devices_on_hosts
from raypipe.cost.kinds import of_kinds
from raypipe.cost.profile import LIMIT, LinkFit, Noise, Profile, Reserved, Slicing, TakenFor
from raypipe.data import declared_fields, prepare_data
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.machine_code import wait_for_ahead
from raypipe.models import LayeredModel, build_model
from raypipe.observe.progress import Notes
from raypipe.partition.pieces import head_of, slicing_of
from raypipe.profiling.effort import QUICK, STEPS, THOROUGH, Effort, keep, profile_path, read_kept
from raypipe.profiling.layer_times import LayerBench
from raypipe.profiling.profiled_steps import to_repeat
from raypipe.profiling.profiling_worker import DeviceFacts, StageProfiler
from raypipe.runtime.cluster.connect import connect, connect_all
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.host_check import check_hosts
from raypipe.runtime.hosts.rank_order import devices_of_kinds
from raypipe.runtime.hosts.reserve import Reservation, is_idle, leave_idle, reserve
from raypipe.runtime.process.memory import pool_gaps
from raypipe.runtime.recovery.failure import outside_a_run
from raypipe.runtime.setup.communicators import Topology, rendezvous_of, sharers
from raypipe.runtime.worker.worker_group import WorkerGroup, start_worker_group
from raypipe.signals import enough_by_interrupt

Say = Callable[[str], None]
SAME = 0.1
"""Relative change of speed up to which a cached profile is used; machines' speed varies by as much over hours."""
PROBE_S = 0.5
"""Seconds of the measurement that checks a cached profile."""
CLEAR_S = 5.0
"""Seconds that the devices have to remove their copies of the data."""


def measure_profile(
    job: JobSpec,
    microbatches: Sequence[int],
    devices: int | None = None,
    *,
    quick: bool = False,
    cached: bool = False,
    data: Path | None = None,
    say: Say = lambda _: None,
    leave: bool = False,
) -> Profile:
    """Measure the job's model on the devices of the Ray cluster; a local Ray is started if there is no cluster.

    Args:
        job: the job; its ``parallel`` section is not used.
        microbatches: micro-batch sizes in samples.
        devices: number of devices that measure at the same time; by default all devices of the cluster.
        quick: whether to take a few seconds instead of about half a minute, with fewer repeats and all-reduce as the
            only collective.
        cached: whether to use the cached profile of the same model on the same devices, if one measurement agrees with
            it, and otherwise to cache the new profile.
        data: folder of the prepared data; None prepares it in a temporary folder.
        say: called with sentences about what is measured and what is left out.
        leave: leave the workers where they are, for the job's run (``reserve.take_idle``).

    Raises:
        SpecError: the micro-batch sizes or the number of devices are invalid, or the measured layers do not fit a
            device.
        ClusterError: the nodes cannot work together.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
        RunError: a device died, for example because it ran out of memory, or the model or its data raised an error.
    """
    sizes = sorted(set(microbatches))
    if not sizes or sizes[0] < 1:
        raise SpecError("microbatches", f"{list(microbatches)} are not micro-batch sizes", "give sizes from 1")
    if devices is not None and devices < 1:
        raise SpecError("devices", f"{devices} devices measure nothing", "give 1 or more, or leave it out for all")
    model = build_model(job, declared_fields(job.data))
    if model.batch_statistics and sizes[0] == 1 and len(sizes) > 1:
        sizes = sizes[1:]  # a single sample may have only one value per channel, and then batch norm has no variance
    count = devices if devices is not None else connect_all()
    request = connect(count)
    effort = QUICK if quick else THOROUGH
    with _folder(job, model, data) as folder:
        measuring = _Measuring(job, model, folder, sizes, effort, say)
        kinds = devices_of_kinds(request, (node["Resources"] for node in ray.nodes() if node["Alive"]))
        if len(kinds) > 1 and "" not in kinds and count == sum(kinds.values()):
            return measuring.of_kinds(kinds, request)
        if len(kinds) > 1:
            why = "some nodes name no accelerator type" if "" in kinds else "only some devices are used"
            say(f"note: devices are measured as if all were of one kind: {why}")
        with measuring.reserved(count, request) as place:
            return measuring.of_one_kind(count, place, cached, leave)


@dataclass(frozen=True, slots=True)
class _Measuring:
    """A measurement: of what, and how thorough."""

    job: JobSpec
    model: LayeredModel
    folder: Path
    sizes: list[int]
    effort: Effort
    say: Say

    def of_kinds(self, kinds: Mapping[str, int], request: DeviceRequest) -> Profile:
        """Measure the devices of each accelerator type, one type after another, and join the profiles.

        A type with one host has no link to another host of its type; the link between the types stands for it.
        """
        profiles = []
        for kind, count in kinds.items():
            self.say(f"devices of accelerator type {kind}")
            with self.reserved(count, request, (kind,) * count) as place:
                result = self.of_one_kind(count, place)
            profiles.append(result.model_copy(update={"accelerator_type": kind}))
        self.say("messages between devices of different types")
        with self.reserved(len(kinds), request, tuple(kinds)) as place:
            between = self._link_between(len(kinds), place)
        return of_kinds(
            [
                p.model_copy(update={"between": between}) if len(p.placed.of_first(p.devices)) == 1 else p
                for p in profiles
            ]
        )

    @contextmanager
    def reserved(self, count: int, request: DeviceRequest, kinds: tuple[str, ...] = ()) -> Iterator[Reservation]:
        """Hold devices, one of each of ``kinds`` if given, while the block lasts; longer if workers stay on them."""
        place = reserve(count, request, self.job.train.wait_for_devices_s, self.say, kinds=kinds)
        try:
            yield place
        finally:
            if not is_idle(place):
                place.give_back()

    def _link_between(self, count: int, place: Reservation) -> LinkFit:
        """Measure messages between hosts, each with one device."""
        titles = [f"links · device {rank}" for rank in range(count)]
        workers = start_worker_group(titles, place.for_attempt(), StageProfiler)
        try:
            check_hosts(workers.actors, workers.locations)
            links = LinkBench(workers)
            links.connect()
            return _link(links.messages(links.between, self.effort.message_bytes, self.effort.repeats))
        finally:
            workers.stop()

    def of_one_kind(self, count: int, place: Reservation, cached: bool = False, leave: bool = False) -> Profile:
        """Measure the ``count`` devices of ``place`` at the same time; see ``measure_profile``."""
        job, model, sizes, effort, say = self.job, self.model, self.sizes, self.effort, self.say
        say(f"starting {count} device actor{'s' * (count > 1)}")
        titles = [f"profile · device {rank}" for rank in range(count)]
        workers = start_worker_group(titles, place.for_attempt(), StageProfiler)
        measured = False
        try:
            check_hosts(workers.actors, workers.locations)
            wait_for_ahead(say)  # it would take a core from what is measured
            on_cpu = all(at.peer.device == "cpu" for at in workers.locations)
            bench = LayerBench(job, model, workers, self.folder, bounded=on_cpu and math.isfinite(effort.whole_s))
            path = profile_path(job, model, sizes, count) if cached else None
            known = read_kept(path) if path is not None else None
            if known is not None and (result := at_present(bench, bench.facts(), *known, effort, say)) is not None:
                measured = True
                # Other data may differ in lengths.
                return result.model_copy(update={"slicing": _slicing(bench), "head": head_of(job, bench.model)})
            profile = profile_by(bench, sizes, effort, say)
            if path is not None and profile.noise.warning() is None and not bench.interrupted:
                keep(path, profile)
            measured = True
            return profile
        except Exception as error:
            raise outside_a_run(error, workers.calls, "profile") from None
        finally:
            with suppress(ray.exceptions.RayError):  # a worker may have died
                ray.get(workers.call("clear"), timeout=CLEAR_S)
            if measured and leave:
                leave_idle(place, workers.by_place())
            else:
                workers.stop()


@contextmanager
def _folder(job: JobSpec, model: LayeredModel, data: Path | None) -> Iterator[Path]:
    """Yield the given folder of data, or prepare the data in a temporary folder for the duration of the block."""
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="raypipe-profile-") as name:
        prepare_data(job, model.task, Path(name))
        yield Path(name)


def at_present(
    bench: LayerBench, facts: Sequence[DeviceFacts], known: Profile, age: str, effort: Effort, say: Say
) -> Profile | None:
    """Adapt a cached profile to the devices' present speed; None if the devices or their speed differ too much.

    One micro-batch size is measured, and all times are scaled by its change, because the speed of a shared machine
    varies over hours.
    """
    if any(fact.name != known.device for fact in facts) or _hosts(facts) != known.placed.of_first(len(facts)):
        return None
    sizes = sorted(known.layers[0].times)
    size = sizes[0] if bench.long else _middle(sizes)
    longer = replace(effort, budget_s=max(PROBE_S, effort.budget_s))
    factor = bench.probe(size, longer) / bench.known_seconds(known, size)
    if abs(change := factor - 1) > SAME:
        say(f"the profile kept {age} ago is {abs(change):.0%} {'too fast' if change > 0 else 'too slow'} now")
        return None
    say(f"took the profile kept {age} ago: micro-batches of {size} take {change:+.0%} now")
    return known.at_speed(factor)


def _hosts(facts: Sequence[DeviceFacts]) -> tuple[int, ...]:
    """Return the devices of each host, in the order of ranks."""
    return devices_on_hosts([fact.node for fact in facts])


def _slicing(bench: LayerBench) -> Slicing:
    return slicing_of(bench.job, bench.model, declared_fields(bench.job.data))


def _middle(sizes: Sequence[int]) -> int:
    return sizes[len(sizes) // 2]


def measure_again(bench: LayerBench, effort: Effort, say: Say, began: float) -> Noise:
    """Repeat disturbed measurements, at most ``effort.again`` times; return the noise that remains.

    On a machine that is always busy, repeating does not help. So no measurement is repeated later than
    ``effort.patience_s`` after ``began`` (monotonic seconds), and the least disturbed ones are used.
    """
    sizes = sorted(bench.stolen)
    ends = sorted({sizes[0], _middle(sizes)})
    drifted, again = bench.drift(ends, effort), 0
    for _ in range(effort.again):
        disturbed = to_repeat(bench.stolen, drifted)
        if not disturbed or time.monotonic() - began > effort.patience_s:
            break
        say(f"{Noise(stolen=max(bench.stolen.values()), drift=drifted).cause()}: measuring again")
        for size in disturbed:
            if drifted > LIMIT:
                bench.forget(size)
            bench.measure(size, effort, memory=False)
        again += len(disturbed)
        drifted = bench.drift(ends, effort)
    return Noise(stolen=max(bench.stolen.values()), drift=drifted, again=again)


def profile_by(bench: LayerBench, sizes: Sequence[int], effort: Effort, say: Say) -> Profile:
    """Measure a profile as ``measure_profile`` does, on running workers; ``sizes`` must be ascending."""
    workers, facts = bench.workers, bench.facts()
    hosts, shared_by = _hosts(facts), sharers(workers.locations)
    sharing = max(hosts)
    memory = min(fact.memory_bytes / count for fact, count in zip(facts, shared_by, strict=True))
    base = fmean(
        fact.base_bytes / (1 if at.peer.device == "cpu" else count)  # of a GPU it is that of all who share it
        for fact, at, count in zip(facts, workers.locations, shared_by, strict=True)
    )
    bench.check_room(memory - base)
    noise = measure_sizes(bench, list(sizes), effort, say, memory - base, sharing > 1)
    code = bench.code_bytes()
    bench.count_loads(min(bench.passes), memory - base)
    inside: list[Timed] = []
    between: list[Timed] = []
    sums: list[TimedCollective] = []
    gaps, each_group, each_edge = pool_gaps(workers.locations[0].peer.device, streams=min(2, len(facts))), 0.0, 0.0
    if len(facts) > 1:
        if not effort.brief:
            say("messages and collectives")
        links = LinkBench(workers)
        links.connect()
        inside = links.messages(links.inside, effort.message_bytes, effort.repeats)
        between = links.messages(links.between, effort.message_bytes, effort.repeats)
        for kind in effort.collectives:
            for size in links.groups:
                sums += links.collective(kind, size, effort.collective_bytes, effort.repeats)
        each_group, each_edge = map(max, zip(*ray.get(workers.call("communicator_bytes")), strict=True))
    return Profile(
        source="measured",
        device=facts[0].name,
        dtype=bench.job.train.dtype,
        taken_for=TakenFor.job(bench.job),
        batch_statistics=bench.model.batch_statistics,
        slicing=_slicing(bench),
        head=head_of(bench.job, bench.model),
        devices=len(facts),
        devices_per_host=sharing,
        hosts=() if hosts == Hosts(sharing).of_first(len(facts)) else hosts,
        memory_bytes=memory,
        base_bytes=base,
        code_bytes=code,
        reserved=Reserved(
            group_bytes=each_group,
            edge_bytes=each_edge,
            fragmentation_bytes=gaps,
            context_bytes=base if workers.locations[0].peer.device != "cpu" else 0.0,
        ),
        layers=bench.profiles(),
        tied_parameters=bench.tied_parameters(),
        trained_tied_parameters=bench.tied_parameters(trained=True),
        update_s_per_parameter=bench.update_s_per_parameter(),
        alone=bench.alone,
        noise=noise,
        task_overhead_s=bench.overhead_seconds(),
        inside=_link(inside or between),
        between=_link(between or inside),
        collectives=fit(sums),
    )


def measure_sizes(bench: LayerBench, sizes: list[int], effort: Effort, say: Say, room: float, shared: bool) -> Noise:
    """Measure the sizes that fit ``room`` bytes of a device, within the effort.

    The planner interpolates between measured sizes and tries none beyond the largest: on the line through smaller ones
    it would seem better than it is, since memory costs more there.

    On a terminal, Ctrl-C after the first size leaves it at what is measured by then.

    Args:
        bench: measures.
        sizes: ascending.
        effort: how much time there is.
        say: called with sentences, and with the seconds left where it shows them.
        room: bytes that layers may use on a device.
        shared: whether a host has several devices, so that one at work alone is compared with all.
    """
    began = time.monotonic()
    layers = f"{len(bench.measured)} of {bench.model.count} layers on each of {len(bench.workers.actors)} devices"
    if effort.brief:
        say(f"micro-batches of {', '.join(map(str, sizes))}: {layers}")
    left = say.left if isinstance(say, Notes) else lambda _: None
    waiting, compared = list(sizes), sizes[0] if bench.long else _middle(sizes)
    left(effort.whole_s)
    with ExitStack() as at_end:
        at_end.callback(left, 0.0)
        enough: Callable[[], bool] = bool  # False: a first size there must be
        while waiting and not enough():
            size = waiting.pop(0)
            if size > sizes[0] and not bench.fits(size, room):
                say(f"micro-batches from {size} on do not fit a device: left out")
                waiting = [other for other in waiting if other < size]
                sizes = [other for other in sizes if other < size]
                continue
            if not effort.brief:
                say(f"micro-batches of {size}: {layers}")
            start = time.monotonic()
            bench.measure(
                size,
                effort,
                effort.every_memory or bench.long or size in (sizes[0], _middle(sizes)),
                alone=size == compared and shared,
            )
            took_s = time.monotonic() - start
            if size == sizes[0]:
                enough = at_end.enter_context(enough_by_interrupt())
                whole_s = max(effort.whole_s, STEPS * bench.step_seconds(size))
                each_s = bench.sample_seconds(size) if bench.long else took_s / size
                waiting = _within(whole_s - (time.monotonic() - began), each_s, waiting, say)
            again = (effort.passes - 1) * len(sizes)
            left(took_s / size * sum(waiting) if bench.long else took_s * (len(waiting) + again))
        sizes = sorted(bench.passes)
        for number in range(1, 1 if enough() else effort.passes):
            say(f"once more, {'from the largest on' if number % 2 else 'from the smallest on'}")
            for size in sizes[::-1] if number % 2 else sizes:
                if not enough():
                    bench.measure(size, effort, memory=False)
        # Where tasks take long, to measure them again would take as long as the job's own steps.
        if not bench.long and not enough():
            return measure_again(bench, effort, say, began)
        bench.interrupted = enough()
        if bench.interrupted:
            say(f"interrupted: going on with micro-batches of {', '.join(map(str, sizes))} as measured")
    return Noise(stolen=max(bench.stolen.values()))


def _within(left_s: float, each_s: float, sizes: list[int], say: Say) -> list[int]:
    """Return the micro-batch sizes that can be measured in ``left_s`` seconds, if each takes ``each_s`` a sample.

    If not all: the largest that fits, and then what still does, because times between two sizes are better known than
    those beyond them.
    """
    if sum(sizes) * each_s <= left_s:
        return sizes
    chosen: list[int] = []
    for size in reversed(sizes):
        if (size + sum(chosen)) * each_s <= left_s:
            chosen.append(size)
    rest = ", ".join(str(size) for size in sizes if size not in chosen)
    taking = (
        f"measuring {', '.join(map(str, sorted(chosen)))} too, about {sum(chosen) * each_s:.0f} s more; "
        if chosen
        else ""
    )
    say(f"{taking}micro-batches of {rest} would take too long: those below the largest size are interpolated")
    return sorted(chosen)


def _link(samples: list[Timed]) -> LinkFit:
    """Fit a link to measured messages; without any (a single device), return a link that costs nothing."""
    return fit_link(samples) if samples else LinkFit(alpha_s=0.0, beta_s_per_byte=0.0)


# Measure messages and collectives between devices, over the transports that training uses.


class LinkBench:
    """Measures all devices joined in one world: pairs of them exchange messages, and groups run collectives."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        locations = ray.get(workers.call("locate"))  # called again for a new port
        nodes = [at.peer.node for at in locations]
        self.inside = _pairs(nodes)
        self.between = _first_of_each(nodes)
        edges = [edge for a, b in (*self.inside, *self.between) for edge in ((a, b), (b, a))]
        self.groups = {size: tuple(range(size)) for size in group_sizes(len(nodes))}
        self.topology = Topology(
            peers=tuple(at.peer for at in locations),
            rendezvous=rendezvous_of(locations),
            edges=tuple(sorted(set(edges))),
            groups={f"first {size}": ranks for size, ranks in self.groups.items()},
            transport="auto",
            run_id=uuid.uuid4().hex[:8],
        )

    def connect(self) -> None:
        """Open every channel and make every group."""
        ray.get(self.workers.call("connect", self.topology))

    def messages(self, pairs: Sequence[tuple[int, int]], sizes: Sequence[int], repeats: int) -> list[Timed]:
        """Return the mean one-way seconds per size in bytes; all pairs measure at the same time."""
        if not pairs:
            return []
        refs = []
        for a, b in pairs:
            refs.append(self.workers.actors[a].message_seconds.remote(b, True, sizes, repeats))
            self.workers.actors[b].message_seconds.remote(a, False, sizes, repeats)
        result = ray.get(refs)
        return [
            Timed(float(size), fmean([t for times in result for t in times[k][1:] or times[k]]))
            for k, size in enumerate(sizes)
        ]

    def collective(self, kind: Kind, size: int, sizes: Sequence[int], repeats: int) -> list[TimedCollective]:
        """Return the mean seconds of the slowest device of a group of ``size``, per size of the whole buffer."""
        result = [
            one
            for one in ray.get(self.workers.call("collective_seconds", kind, f"first {size}", sizes, repeats))
            if one
        ]
        return [
            TimedCollective(kind, size, float(n), fmean(map(max, zip(*(one[k] for one in result), strict=True))))
            for k, n in enumerate(sizes)
        ]


def group_sizes(devices: int) -> list[int]:
    """Return the sizes of the groups that are measured: powers of two, and all devices.

    >>> group_sizes(6), group_sizes(1)
    ([2, 4, 6], [])
    """
    sizes = {2**k for k in range(1, devices.bit_length()) if 2**k <= devices}
    return sorted(sizes | ({devices} if devices > 1 else set()))


def _pairs(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Pair devices of the same host; no device is in two pairs.

    >>> _pairs(["a", "a", "b", "a", "a", "b"])
    [(0, 1), (2, 5), (3, 4)]
    """
    waiting: dict[str, int] = {}
    result = []
    for rank, node in enumerate(nodes):
        if node in waiting:
            result.append((waiting.pop(node), rank))
        else:
            waiting[node] = rank
    return sorted(result)


def _first_of_each(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Pair hosts, each represented by its first device; no host is in two pairs.

    >>> _first_of_each(["a", "a", "b", "c"])
    [(0, 2)]
    """
    first = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    return list(zip(first[::2], first[1::2], strict=False))
