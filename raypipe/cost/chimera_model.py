"""Chimera's closed-form performance model (Eq. 1), and its differences from the simulator.

``T = (F_t + c) * C_f + (B_t + c) * C_b + max over devices of the all-reduce time that does not fit the free regions``.

Source: Li and Hoefler 2021 (Chimera), section 3.4 and figure 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, JOINT
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync, held
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Timeline, critical_path


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The terms of Eq. 1 for one schedule."""

    forward_s: float
    """F_t: the mean over stages, since the model assumes even stages."""
    backward_s: float
    """B_t: twice F_t, or three times if activations are recomputed."""
    message_s: float
    """c: latency of the slowest link."""
    forwards: float
    """C_f: forwards on the critical path, in micro-batches."""
    backwards: float
    """C_b: backwards on the critical path, in micro-batches."""
    unoverlapped_s: float
    """All-reduce time that does not fit the free regions, on the device where it is longest."""

    @property
    def compute_s(self) -> float:
        """F_t * C_f + B_t * C_b."""
        return self.forward_s * self.forwards + self.backward_s * self.backwards

    @property
    def messages_s(self) -> float:
        """c * (C_f + C_b)."""
        return self.message_s * (self.forwards + self.backwards)

    @property
    def step_s(self) -> float:
        """T."""
        return self.compute_s + self.messages_s + self.unoverlapped_s


def closed_form(schedule: Schedule, costs: CostTable, copies: int = 1) -> ClosedForm:
    """Evaluate Eq. 1 for a schedule with joint backwards, Chimera's or any other.

    Args:
        schedule: tasks of one data-parallel copy; all-reduces and updates are ignored.
        costs: forwards, links and all-reduces are used; the backward is modelled from the forward.
        copies: data-parallel copies; with one copy, a stage that only one device holds needs no all-reduce.

    Raises:
        ScheduleError: the schedule has split backwards, which the equation does not cover.
    """
    bare = _bare(schedule)
    timeline = simulate(bare, _model_costs(bare, 1.0))
    path = critical_path(timeline).spans
    size = float(bare.size)
    forwards = sum(len(s.task.mbs) * size for s in path if s.task.kind == "F")
    backwards = sum(len(s.task.mbs) * size for s in path if s.task.kind in JOINT)
    forward_s = fmean(costs.forward)
    all_reduce = _all_reduces(bare, costs, copies)
    return ClosedForm(
        forward_s=forward_s,
        backward_s=forward_s * _ratio(bare),
        message_s=max(costs.links[:-1], default=0.0),
        forwards=forwards,
        backwards=backwards,
        unoverlapped_s=max(
            unoverlapped(timeline, d, [(s, r, all_reduce[s]) for s, r in own], forward_s)
            for d, own in enumerate(held(bare))
        ),
    )


def unoverlapped(timeline: Timeline, device: int, sums: Sequence[tuple[int, int, float]], unit: float) -> float:
    """Return the seconds of a device's all-reduces that its free regions cannot hide.

    A stage's free regions are the device's bubbles from the stage's last gradient to the end of the step. All-reduces
    run one after another, in the order in which their stages become ready.

    Args:
        timeline: compute tasks only, in units of one forward.
        device: number of the device.
        sums: its all-reduces as (stage, replica, seconds).
        unit: seconds of one forward.
    """
    spans = timeline.spans[device]
    ready = {
        (s, r): max(
            (x.end for x in spans if x.task.kind in JOINT and (x.task.stage, x.task.replica) == (s, r)), default=0.0
        )
        for s, r, _ in sums
    }
    edges = [0.0, *(t for x in spans for t in (x.start, x.end)), timeline.makespan]
    gaps = [(a * unit, b * unit) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    left, now = 0.0, 0.0
    for stage, replica, seconds in sorted(sums, key=lambda x: ready[x[0], x[1]]):
        now = max(now, ready[stage, replica] * unit)
        for begin, end in gaps:
            used = min(seconds, max(0.0, end - max(begin, now)))
            if used > 0:
                now = max(begin, now) + used
                seconds -= used
        left += seconds
    return left


class Difference(NamedTuple):
    """One term of the step time in both models."""

    what: str
    closed_s: float
    simulated_s: float
    why: str
    """Why they may differ."""


def differences(schedule: Schedule, costs: CostTable, copies: int = 1, sync: Sync = "eager-opt") -> list[Difference]:
    """Compare Eq. 1 with the simulator term by term; each column adds up to that model's step time.

    The simulator's terms are the increases of the step time when costs are added one after another: even stages, then
    messages, the measured backward, the differences between stages, all-reduces and updates.

    Args:
        schedule: as for ``closed_form``.
        costs: costs of its stages.
        copies: data-parallel copies.
        sync: where all-reduces are placed (Chimera's choice is ``eager-opt``).

    Raises:
        ScheduleError: as for ``closed_form``.
    """
    closed = closed_form(schedule, costs, copies)
    bare = _bare(schedule)
    nothing = (0.0,) * costs.stages
    model = _model_costs(bare, closed.forward_s)
    linked = replace(model, comm=costs.comm)
    backward_kinds = ("input_grad", "weight_grad", "recompute")
    means: dict[str, Any] = {k: (fmean(getattr(costs, k)),) * costs.stages for k in backward_kinds}
    backward = replace(linked, **means)
    uneven = replace(costs, all_reduce=nothing, update=nothing)
    ends = [simulate(bare, table).makespan for table in (model, linked, backward, uneven)]
    # Two copies stand for any number of them: the all-reduce times already account for the number.
    full = replace(costs, all_reduce=tuple(_all_reduces(bare, costs, copies)))
    whole = place_gradient_sync(replicate(bare, min(copies, 2)), sync, replace(full, update=nothing))
    ends.append(simulate(whole, replace(full, update=nothing)).makespan)
    ends.append(simulate(add_updates(whole), full).makespan)
    added = [b - a for a, b in zip([0.0, *ends[:-1]], ends, strict=True)]
    rows = (
        (
            "even stages, backward from forward",
            closed.compute_s,
            "Eq. 1 adds a recomputation to each backward of the path, even if it fits into a wait",
        ),
        ("messages", closed.messages_s, "Eq. 1 adds one for every task of the path; many fall into bubbles"),
        ("actual backward", 0.0, "Eq. 1 assumes a multiple of the forward"),
        ("uneven stages", 0.0, "Eq. 1 assumes that every stage is the mean of all"),
        ("all-reduces", closed.unoverlapped_s, "Eq. 1 hides them in bubbles only, the simulator also behind compute"),
        ("updates", 0.0, "Eq. 1 has none"),
    )
    return [Difference(what, c, s, why) for (what, c, why), s in zip(rows, added, strict=True)]


def _bare(schedule: Schedule) -> Schedule:
    if any(t.kind == "W" for t in schedule.tasks()):
        raise ScheduleError(
            "schedule", f"{schedule.name} has split backwards; Eq. 1 covers joint ones only", "use the simulator"
        )
    return schedule.without(BOOKKEEPING)


def _ratio(schedule: Schedule) -> float:
    return 3.0 if any(t.kind == "R" for t in schedule.tasks()) else 2.0


def _model_costs(schedule: Schedule, forward: float) -> CostTable:
    """Costs of even stages: a backward takes two forwards, a recomputation one."""
    return CostTable.even(schedule.stages, forward=forward, input_grad=forward, weight_grad=forward, recompute=forward)


def _all_reduces(schedule: Schedule, costs: CostTable, copies: int) -> list[float]:
    """Seconds of each stage's all-reduce; 0 if only one device holds the stage."""
    holders = [copies * len({row[s] for row in schedule.placement}) for s in range(schedule.stages)]
    return [t if n > 1 else 0.0 for t, n in zip(costs.all_reduce, holders, strict=True)]
