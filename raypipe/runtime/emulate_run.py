"""Emulate a schedule end to end: start the emulated devices, run steps, hold them against the prediction."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import ray

from raypipe.errors import ScheduleError
from raypipe.runtime.cluster import connect
from raypipe.runtime.driver import AHEAD
from raypipe.runtime.emulation import EmulatedSetup, EmulatedStage
from raypipe.runtime.gradients import shared_groups
from raypipe.runtime.launch import start_fleet
from raypipe.runtime.links import Wiring, rendezvous_of
from raypipe.runtime.measure import StepClock
from raypipe.schedule.costs import CostTable
from raypipe.schedule.endless import WHOLE, Part, parts
from raypipe.schedule.ir import Schedule
from raypipe.schedule.messages import edges, step_programs
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.verify import verify
from raypipe.simulate.cyclic import Norm
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from raypipe.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The emulated network, in seconds and bytes."""

    latency_s: float = 0.0
    """Of every message between devices, on top of the cost table's ``comm``."""
    bytes_per_s: float = math.inf
    """Of every directed link."""
    message_bytes: float = 0.0
    """Of an activation or a gradient between two stages."""
    gradient_bytes: float = 0.0
    """Of one stage's weight gradients, summed over its holders."""

    @property
    def seconds_per_message(self) -> float:
        """A message's bytes over the bandwidth."""
        return self.message_bytes / self.bytes_per_s

    def all_reduce_s(self, holders: int) -> float:
        """Rabenseifner's algorithm: 2 log2(r) latencies, and 2 (r-1)/r of the bytes (Chimera section 3.4)."""
        if holders < 2:
            return 0.0
        share = 2 * (holders - 1) / holders
        return 2 * math.log2(holders) * self.latency_s + share * self.gradient_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Emulated:
    """What an emulation showed, in seconds."""

    predicted_s: float
    """Steady time per step."""
    predicted_makespan_s: float
    """The first step alone."""
    measured_s: list[float]
    """Per step, from the end of the one before; the first from its own start."""
    bubble_ratio: float
    dispatch_overhead_s: float
    """Median measured step beyond the prediction."""
    timeline: Timeline
    """The last step as measured."""


def emulate(
    base: Schedule, costs: CostTable, links: Links, steps: int, replicas: int, norm: Norm = "free", clip_every: int = 0
) -> Emulated:
    """Run ``steps`` steps of ``replicas`` data-parallel copies of ``base`` on emulated devices.

    ``costs`` are in seconds. Stages with several holders sum their gradients lazily, then update; steps follow one
    another without a global barrier, but for a global gradient ``norm`` that updates wait for. Where they run ahead of
    it, every ``clip_every``-th step's update is undone and the forwards since then run again; the prediction leaves
    that out.

    Raises:
        ScheduleError: the schedule cannot run, or its updates cannot wait for a norm.
        SpecError: more devices than Ray can give.
    """
    schedule = add_updates(place_gradient_sync(replicate(base, replicas), "lazy", costs))
    verify(schedule)
    if (
        norm
        not in {"flush": ("free", "wait", "ahead"), "2bw": ("free", "ahead"), "stash": ("free",)}[schedule.versions]
    ):
        raise ScheduleError("norm", f"{schedule.name}'s updates wait for none", "use free, or with 2BW ahead")
    holders = [len({held[s] for held in schedule.placement}) for s in range(schedule.stages)]
    costs = replace(
        costs,
        comm=tuple(c + links.latency_s + links.seconds_per_message for c in costs.links),
        all_reduce=tuple(links.all_reduce_s(r) for r in holders),
    )
    request = connect(schedule.devices, emulated=True)
    fleet = start_fleet(schedule, replicas, request, EmulatedStage)
    clock = StepClock(schedule)
    try:
        _setup(fleet, schedule, costs, links, norm, clip_every if schedule.versions == "flush" else 0)
        measured = _steps(fleet, clock, schedule, steps)
    finally:
        fleet.stop()
    whole = simulate(schedule, costs)
    steady = period(schedule, costs, norm=norm) if steps > 1 else whole.makespan
    last = clock.measured()
    assert last is not None
    later = measured[1:] or measured
    busy = sum(whole.busy)
    return Emulated(
        predicted_s=steady,
        predicted_makespan_s=whole.makespan,
        measured_s=measured,
        bubble_ratio=1.0 - busy / (schedule.devices * median(later)),
        dispatch_overhead_s=median(later) - steady,
        timeline=last,
    )


def _setup(fleet: Any, schedule: Schedule, costs: CostTable, links: Links, norm: Norm, clip_every: int) -> None:
    wiring = Wiring(
        peers=tuple(x.peer for x in fleet.locations),
        rendezvous=rendezvous_of(fleet.locations),
        edges=edges(schedule),
        groups=shared_groups(schedule.placement, ()),
        transport="auto",
        run_id=fleet.run_id,
    )
    ways = parts(schedule)
    lowered = step_programs(schedule, ahead=norm == "ahead")
    times = {part: [tuple(costs.durations(one, list(order))) for order in one.orders] for part, one in ways.items()}
    ray.get(
        [
            actor.setup.remote(
                EmulatedSetup(
                    rank=rank,
                    wiring=wiring,
                    microbatches=schedule.microbatches,
                    stages=schedule.stages,
                    programs={part: rows[rank] for part, rows in lowered.items()},
                    durations={part: rows[rank] for part, rows in times.items()},
                    latency_s=tuple(c - links.seconds_per_message for c in costs.links),
                    seconds_per_message=links.seconds_per_message,
                    norm=norm,
                    clip_every=clip_every,
                )
            )
            for rank, actor in enumerate(fleet.actors)
        ]
    )


def _steps(fleet: Any, clock: StepClock, schedule: Schedule, steps: int) -> list[float]:
    measured: list[float] = []
    pending: deque[tuple[Part, list[Any]]] = deque()

    def collect() -> None:
        part, refs = pending.popleft()
        measured.append(clock.add(part, ray.get(refs))[0])

    for step in range(steps):
        part = WHOLE if schedule.versions == "flush" else (step == 0, step == steps - 1)
        pending.append((part, fleet.call("run_step", step, part)))
        if len(pending) > AHEAD:
            collect()
    while pending:
        collect()
    return measured
