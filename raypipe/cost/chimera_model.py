"""Chimera's closed performance model (Eq. 1), and where the simulator says something else.

``T = (F_t + c) * C_f + (B_t + c) * C_b + max over devices of the gradient sums that do not fit their free regions``.

Source: Li and Hoefler 2021 (Chimera), section 3.4 and figure 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, JOINT
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync, held
from raypipe.simulate.critical import critical_path
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Eq. 1, worked out."""

    forward_s: float
    """F_t: the stages' mean, since the model takes them to be even."""
    backward_s: float
    """B_t: twice F_t, three times where activations are recomputed."""
    message_s: float
    """c: of the slowest link."""
    forwards: float
    """C_f: forwards on the critical path, in micro-batches."""
    backwards: float
    """C_b."""
    unoverlapped_s: float
    """Gradient sums beyond the free regions, on the device where that is most."""

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
    """Eq. 1 for one pipeline's schedule (any one with joint backwards, Chimera's or not).

    Args:
        schedule: tasks of one data-parallel copy, gradient sums and updates not needed.
        costs: forwards, links and gradient sums are taken from it; the backward is modelled from the forward.
        copies: data-parallel copies; with one copy, stages that one device holds alone need no sum.

    Raises:
        ScheduleError: split backwards, which the equation does not know.
    """
    bare = _bare(schedule)
    timeline = simulate(bare, _model_costs(bare, 1.0))
    path = critical_path(timeline).spans
    size = float(bare.size)
    forwards = sum(len(s.task.mbs) * size for s in path if s.task.kind == "F")
    backwards = sum(len(s.task.mbs) * size for s in path if s.task.kind in JOINT)
    forward_s = fmean(costs.forward)
    summed = _sums(bare, costs, copies)
    return ClosedForm(
        forward_s=forward_s, backward_s=forward_s * _ratio(bare),
        message_s=max(costs.links[:-1], default=0.0), forwards=forwards, backwards=backwards,
        unoverlapped_s=max(
            unoverlapped(timeline, d, [(s, r, summed[s]) for s, r in own], forward_s)
            for d, own in enumerate(held(bare))
        ),
    )  # fmt: skip


def unoverlapped(timeline: Timeline, device: int, sums: Sequence[tuple[int, int, float]], unit: float) -> float:
    """Seconds of a device's gradient sums that its free regions cannot hide.

    A stage's free regions are the device's bubbles after the stage's last gradient, up to the end of the step. Sums
    run one after another, in the order their stages get ready.

    Args:
        timeline: compute alone, in units of one forward.
        device: which one.
        sums: (stage, replica, seconds).
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
    """One term of a step, as both models see it."""

    what: str
    closed_s: float
    simulated_s: float
    why: str
    """Why they differ, where they do."""


def differences(schedule: Schedule, costs: CostTable, copies: int = 1, sync: Sync = "eager-opt") -> list[Difference]:
    """Eq. 1 beside the simulator, term by term; each column adds up to that model's step time.

    The simulator's terms are what each thing adds to the step: even stages, then messages, then the backward's real
    time, then the stages' real differences, gradient sums, updates.

    Args:
        schedule: as for ``closed_form``.
        costs: of its stages.
        copies: data-parallel copies.
        sync: where gradient sums are placed (Chimera's own choice is ``eager-opt``).

    Raises:
        ScheduleError: as ``closed_form``.
    """
    closed = closed_form(schedule, costs, copies)
    bare = _bare(schedule)
    nothing = (0.0,) * costs.stages
    model = _model_costs(bare, closed.forward_s)
    linked = replace(model, comm=costs.comm)
    backward = replace(
        linked, **{k: (fmean(getattr(costs, k)),) * costs.stages for k in ("input_grad", "weight_grad", "recompute")}
    )
    uneven = replace(costs, all_reduce=nothing, update=nothing)
    ends = [simulate(bare, table).makespan for table in (model, linked, backward, uneven)]
    # Two copies behave like any number of them: the sums' times have the number in them.
    full = replace(costs, all_reduce=tuple(_sums(bare, costs, copies)))
    whole = place_gradient_sync(replicate(bare, min(copies, 2)), sync, replace(full, update=nothing))
    ends.append(simulate(whole, replace(full, update=nothing)).makespan)
    ends.append(simulate(add_updates(whole), full).makespan)
    added = [b - a for a, b in zip([0.0, *ends[:-1]], ends, strict=True)]
    rows = (
        (
            "even stages, backward from forward",
            closed.compute_s,
            "Eq. 1 charges each backward of the path a recomputation, also where that fits into a wait",
        ),
        ("messages", closed.messages_s, "Eq. 1 charges one for every task of the path; many fall into bubbles"),
        ("backward's own time", 0.0, "Eq. 1 takes it as a multiple of the forward"),
        ("stages that differ", 0.0, "Eq. 1 takes every stage for the mean of all"),
        ("gradient sums", closed.unoverlapped_s, "Eq. 1 hides them in bubbles only, the simulator beside compute too"),
        ("updates", 0.0, "Eq. 1 has none"),
    )
    return [Difference(what, c, s, why) for (what, c, why), s in zip(rows, added, strict=True)]


def _bare(schedule: Schedule) -> Schedule:
    if any(t.kind == "W" for t in schedule.tasks()):
        raise ScheduleError(
            "schedule", f"{schedule.name} has split backwards; Eq. 1 speaks of joint ones", "use the simulator"
        )
    return schedule.with_orders([t for t in order if t.kind not in BOOKKEEPING] for order in schedule.orders)


def _ratio(schedule: Schedule) -> float:
    return 3.0 if any(t.kind == "R" for t in schedule.tasks()) else 2.0


def _model_costs(schedule: Schedule, forward: float) -> CostTable:
    """Even stages, a backward of two forwards, a recomputation of one."""
    return CostTable.even(schedule.stages, forward=forward, input_grad=forward, weight_grad=forward, recompute=forward)


def _sums(schedule: Schedule, costs: CostTable, copies: int) -> list[float]:
    """Seconds of each stage's gradient sum; none where one device alone holds the stage."""
    holders = [copies * len({row[s] for row in schedule.placement}) for s in range(schedule.stages)]
    return [t if n > 1 else 0.0 for t, n in zip(costs.all_reduce, holders, strict=True)]
