"""Plans whose cut, placement and order were found together, beside interleaved 1F1B on the even cut, on stage actors.

The cases are those of ``joint``, and so is what the measured step is held against: a clock that shares nothing with the
planner or the runtime (``tests/plan/joint/clock.py``). Real driver, actors, programs and messages; kernels are timed
waits. The two plans of a case take turns. What a device holds is read off the order in which it ran its tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log

from raypipe.plan.candidate import Candidate
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.kinds import COMPUTE
from raypipe.simulate.timeline import Timeline
from tests.bench.search.joint import Asked, adaptis_cases, asked, plan_name, solve, write_plan
from tests.bench.search.line import Effort, Line
from tests.bench.turns import Turns, take_turns
from tests.plan.joint.clock import Timed, time_of

CLOSE = 0.03
"""Most that a measured step may differ from the clock's."""
ROUNDS, STEPS = 2, 4
"""Turns of each plan, and steps of a turn, of which the first is left out: it has nobody to wait for."""


@dataclass(slots=True)
class Run:
    """One plan and its turns."""

    of: Asked
    cut: list[list[int]]
    clocked: Timed
    turns: Turns
    peak_bytes: float = 0.0
    """Of the fullest device, by the order in which it ran its tasks."""

    @property
    def step_s(self) -> float:
        """Of the median turn."""
        return self.turns.step_s

    @property
    def error(self) -> float:
        """Share by which the median turn is longer than the clock says."""
        return self.step_s / self.clocked.makespan - 1


def emulated(effort: Effort) -> Iterator[Line]:
    """A line for each case, then the mean speed-up."""
    cases = adaptis_cases()[effort.first :][: effort.count or None]
    result: list[tuple[str, Run, Run]] = []
    for name, profile, devices, per in cases:
        kept = None if effort.plans is None else effort.plans / f"{plan_name(name, devices, per)}.json"
        of = asked(profile, devices, per * devices)
        if kept is not None and kept.exists():
            plan = json.loads(kept.read_text())
            order, cut = plan["order"], plan["cut"]
        else:
            f = solve(profile, devices, per * devices, effort.seconds)
            order, cut = f.order, [list(own) for own in f.plan.cut]
            if kept is not None:
                write_plan(kept, f)
        title = f"{name:16} P={devices:<2} N={per * devices:<2}"
        result.append((title, _run(of, of.base_order, of.base_cut), _run(of, order, cut)))
    runs = {id(one.turns): one for _, base, plan in result for one in (base, plan)}
    take_turns([one.turns for one in runs.values()], ROUNDS, STEPS, then=lambda turns: _weigh(runs[id(turns)]))
    yield from _lines(result)


def _run(of: Asked, order: str, cut: list[list[int]]) -> Run:
    """A plan with its costs, as the runtime and as the clock have them."""
    schedule = from_text(order, "plan")
    split = any(task.kind == "W" for task in schedule.tasks())
    layers = tuple(map(tuple, cut))
    costs = of.judge.costs_of(Candidate.on(of.grid, "auto"), layers, schedule.placement, split)
    clocked = time_of(order, cut, of.layers, of.messages)
    return Run(of, cut, clocked, Turns(rehearsal(schedule, costs, Links(), 1, "wait")))


def _weigh(one: Run) -> None:
    """Take down what its last turn held, by the order in which that ran its tasks."""
    assert one.turns.last is not None
    ran = time_of(_ran(one.turns.last.timeline), one.cut, one.of.layers, one.of.messages)
    one.peak_bytes = max(one.peak_bytes, *ran.peaks)


def _ran(timeline: Timeline) -> str:
    """The order in which devices ran their tasks, as text."""
    lines = []
    for d, spans in enumerate(timeline.spans):
        tasks = [x.task for x in sorted(spans, key=lambda x: x.start) if x.task.kind in COMPUTE]
        lines.append(f"device {d}: " + " ".join(f"{t.stage}{t.kind}{t.mbs[0]}" for t in tasks))
    return "\n".join(lines)


def _lines(found: list[tuple[str, Run, Run]]) -> Iterator[Line]:
    for title, base, plan in found:
        worst = max(abs(base.error), abs(plan.error))
        times = f"interleaved {base.step_s:.3f} s ({base.error:+.2%}), found {plan.step_s:.3f} s ({plan.error:+.2%})"
        ratio, hoped = base.step_s / plan.step_s, base.clocked.makespan / plan.clocked.makespan
        memory = f"fullest device {plan.peak_bytes / base.peak_bytes:.3f} of interleaved 1F1B's"
        yield Line(f"{title} {times}, {ratio:.3f}x ({hoped:.3f}x predicted), {memory}", worst, CLOSE)
        yield Line(f"{title} memory", plan.peak_bytes, base.peak_bytes * 1.0005)
    ratios = [base.step_s / plan.step_s for _, base, plan in found]
    yield Line(f"geometric mean {exp(sum(map(log, ratios)) / len(ratios)):.3f}x of {len(ratios)}, measured")
