"""Replay measured steps, with everything as it was or with some causes of lost time taken out.

The replay runs the same tasks in the same order. Each takes its measured time, and begins after what it depends on by
its measured gap (``gaps``), so with nothing mended the replay is the measured run. It is timed by the simulator's clock
(``schedule.walk``), one step after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cached_property
from statistics import median
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.gaps import StepGaps, Waits, merged, take_apart, waits_of
from raypipe.explain.measured import WORK, Measured
from raypipe.plan.online.stragglers import Key, slowdowns
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import COMPUTE, NETWORK, Kind
from raypipe.simulate.period import CyclicGraph, Edges


class Replay:
    """The replay of some consecutive steps.

    Raises:
        ScheduleError: the schedule cannot run.
    """

    def __init__(self, of: Measured) -> None:
        self.of = of
        graph = link(of.schedule)
        if of.schedule.versions == "stash":  # one after every micro-batch: it follows its own gradient on its device
            graph.preds = [[] if t.kind == "U" else p for t, p in zip(graph.tasks, graph.preds, strict=True)]
        self.waits: Waits = waits_of(of, graph)
        self.steps: list[StepGaps] = take_apart(of, self.waits)
        self._device = np.array(graph.device, dtype=int)
        kinds = [t.kind for t in graph.tasks]
        self._is = {
            "work": np.array([k in WORK for k in kinds], dtype=bool),
            "recompute": np.array([k == "R" for k in kinds], dtype=bool),
            "sync": np.array([k in ("AR", "RS") for k in kinds], dtype=bool),
            "gather": np.array([k == "AG" for k in kinds], dtype=bool),
        }
        measured = np.array([one.work for one in self.steps])
        self.base: NDArray[np.float64] = undisturbed(of, graph, measured)
        """``[steps, tasks]``: seconds of each task on an undisturbed device."""
        self._edges: dict[frozenset[Mend], list[tuple[Edges, Edges]]] = {}
        self._times: dict[frozenset[Mend], float] = {}

    @property
    def counted(self) -> slice:
        """Steps whose time is explained: all but the first, which leads in, unless it is the only one."""
        return slice(1, None) if len(self.steps) > 1 else slice(None)

    @cached_property
    def measured_s(self) -> float:
        """Measured seconds per step."""
        ends = [max(float(t[:, 1].max()) for t in step.times if len(t)) for step in self.of.steps]
        if len(ends) > 1:
            return (ends[-1] - ends[0]) / (len(ends) - 1)
        return ends[0] - min(float(t[:, 0].min()) for t in self.of.steps[0].times if len(t))

    @cached_property
    def device_work_s(self) -> NDArray[np.float64]:
        """``[steps, devices]``: undisturbed seconds of the work that a step cannot do without."""
        work = np.where(self._is["work"], self.base, 0.0)
        devices = self.of.schedule.devices
        return np.array([np.bincount(self._device, row, minlength=devices) for row in work])

    @cached_property
    def ideal_s(self) -> float:
        """Seconds of a step whose work is divided evenly over all devices, none of which ever waits."""
        return float(self.device_work_s[self.counted].mean())

    @cached_property
    def _even(self) -> NDArray[np.float64]:
        """Per step and task, by what its time is multiplied so that the work is divided evenly.

        Every task of a kind then takes as long as on the other stages, and every device as long as the others in sum.
        """
        graph, base = self.waits.graph, self.base
        factor = np.ones_like(base)
        kinds = np.array([t.kind for t in graph.tasks])
        each = np.array([max(1, len(t.mbs)) for t in graph.tasks])
        for kind in WORK:
            own = np.flatnonzero(kinds == kind)
            stages = np.array([graph.tasks[i].stage for i in own])
            for row in range(len(base)) if len(own) else ():
                one = base[row, own] / each[own]
                typical = np.array(
                    [one[stages == s].mean() if (stages == s).any() else 0.0 for s in range(graph.schedule.stages)]
                )[stages]
                if typical.min() > 0:
                    factor[row, own] = one.mean() / typical
        sums = np.array(
            [
                np.bincount(self._device, row, minlength=graph.schedule.devices)
                for row in np.where(self._is["work"], base * factor, 0.0)
            ]
        )
        goal = self.device_work_s.mean(axis=1, keepdims=True)
        scale = np.divide(goal, sums, out=np.ones_like(sums), where=sums > 0)
        return np.where(self._is["work"], factor * scale[:, self._device], 1.0)

    def step_s(self, mended: Collection[Mend] = ()) -> float:
        """Return seconds per step without the causes that are mended."""
        key = frozenset(mended)
        if key not in self._times:
            self._times[key] = self._run(key)
        return self._times[key]

    @no_collection()
    def _run(self, mended: frozenset[Mend]) -> float:
        if any(m.cause == "warm-up" for m in mended):
            return self._alone(mended)
        end, ends = None, []
        edges = self._edges_of(frozenset(m for m in mended if m.cause in ("link", "norm")))
        for k, (one, (also, before)) in enumerate(zip(self.steps, edges, strict=True)):
            durations = self._durations(k, one, mended).tolist()
            graph = CyclicGraph(self.waits.graph, durations, 0.0, before, also)
            if end is None:
                graph.carried = {i: [(0, at)] for i, at in one.begin.items()}
                done = graph.turn([0.0])
            else:
                done = graph.turn(end)
            end = done.end
            ends.append(max(end))
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]

    def _alone(self, mended: frozenset[Mend]) -> float:
        """Seconds per step if no device waited for another one's tasks."""
        lane = np.array([t.kind not in NETWORK for t in self.waits.graph.tasks])
        devices = self.of.schedule.devices
        rows = [
            np.bincount(self._device, np.where(lane, self._durations(k, one, mended), 0.0), minlength=devices)
            for k, one in enumerate(self.steps)
        ]
        return float(np.array(rows[self.counted]).mean(axis=0).max())

    def _durations(self, k: int, one: StepGaps, mended: frozenset[Mend]) -> NDArray[np.float64]:
        """Per task, seconds from when it could begin to its end."""

        def part(cause: str, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.where(self._mended(cause, mended), 0.0, seconds)

        work = np.where(self._mended("straggler", mended), self.base[k], one.work)
        work = np.where(self._mended("imbalance", mended), work * self._even[k], work)
        for cause in ("recompute", "sync", "gather"):
            work = np.where(self._is[cause] & self._mended(cause, mended), 0.0, work)
        return work + part("host", one.host) + part("data", one.data) + part("norm", one.norm) + part("sync", one.sums)

    def _mended(self, cause: str, mended: frozenset[Mend]) -> NDArray[np.bool_]:
        """Per task, whether this cause is mended on its device."""
        result = np.zeros(len(self._device), dtype=bool)
        for m in mended:
            if m.cause == cause:
                result |= True if m.where is None else self._device == m.where
        return result

    def _edges_of(self, mended: frozenset[Mend]) -> list[tuple[Edges, Edges]]:
        """Per step, what tasks wait for of their own step and of the step before."""
        if mended not in self._edges:
            links = {m.where for m in mended if m.cause == "link"}
            device = self.waits.graph.device

            def mends(p: int, i: int) -> bool:
                return None in links or (device[p], device[i]) in links

            no_norm = any(m.cause == "norm" for m in mended)
            self._edges[mended] = [self._edges_of_step(one, mends, no_norm) for one in self.steps]
        return self._edges[mended]

    def _edges_of_step(self, one: StepGaps, mends: Callable[[int, int], bool], no_norm: bool) -> tuple[Edges, Edges]:
        w = self.waits
        messages: Edges = {}
        for (p, i), lag in one.lags.items():
            if lag and not mends(p, i):
                messages.setdefault(i, []).append((p, lag))
        late: Edges = {}
        for (p, i), lag in one.late_lags.items():
            late.setdefault(i, []).append((p, 0.0 if mends(p, i) else lag))
        if no_norm:
            return merged(w.own, messages), merged(w.carried, late)
        return merged(w.own, messages, w.norm), merged(w.carried, late, w.norm_after)


# Parts of a step that can be mended: each cause of lost time, on all devices or on one.


Cause = Literal["imbalance", "warm-up", "link", "sync", "gather", "recompute", "data", "norm", "straggler", "host"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
MENDABLE: Final[tuple[Cause, ...]] = tuple(c for c in CAUSES if c != "warm-up")
"""Causes that a replay can be without; warm-up is what then remains above the ideal step."""
MEANING: Final[dict[Cause, str]] = {
    "imbalance": "the cut gives some devices more work than others",
    "warm-up": "devices wait for the first micro-batches and after the last, and where the order has holes",
    "link": "messages between stages are under way while their receiver has nothing to do",
    "sync": "gradient sums (all-reduces, reduce-scatters) that compute does not hide",
    "gather": "gathers of sharded weights that compute does not hide",
    "recompute": "forwards that are computed twice to save memory",
    "data": "the samples came late",
    "norm": "updates wait for the global gradient norm",
    "straggler": "a device takes longer than its twins, its own usual time or its profile",
    "host": "the host starts tasks late: dispatch, Python, and what else is between tasks and steps",
}


class Mend(NamedTuple):
    """One cause taken out of a step."""

    cause: Cause
    where: int | tuple[int, int] | None = None
    """On one device, or of ``link`` between one pair (sender, receiver); None: everywhere."""


# Times that tasks would have taken on an undisturbed device: the line between a straggler and a bad cut.
#
# A stage that is too large is slow always and wherever it runs; a disturbed device is slower than something it should
# equal. Four things tell the two apart:
#
# - the task's own usual time in the measured steps: single tasks that took longer were disturbed, unless their
#   micro-batch took longer on every device;
# - other holders of the same stage (data-parallel copies);
# - the same tasks in the run's first steps;
# - what the profile expects of the stage, relative to the other stages.
#
# The last three are ``stragglers.slowdowns``. What none of them shows is the cut's fault.


def share(task: Task) -> int:
    """Return by what a task's time is divided to compare it with others: its micro-batches."""
    return max(1, len(task.mbs))


def undisturbed(of: Measured, graph: TaskGraph, work: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time that each compute task and update would have taken on an undisturbed device.

    Args:
        of: the steps, for what their tasks should take.
        graph: the linked schedule.
        work: ``[steps, tasks]``: seconds that each task computed.

    Returns:
        ``[steps, tasks]``; other kinds of task keep their time.
    """
    keys = [(graph.device[i], t.kind, t.stage) for i, t in enumerate(graph.tasks)]
    each: dict[Key, list[float]] = defaultdict(list)
    for i, (task, key) in enumerate(zip(graph.tasks, keys, strict=True)):
        if _compares(task.kind):
            each[key] += (work[:, i] / share(task)).tolist()
    usual = {key: median(values) for key, values in each.items()}
    slow = slowdowns(usual, of.planned, of.earlier, graph.schedule.devices)
    result = work.copy()
    longer = _longer_microbatches(graph, keys, usual, work)
    for i, (task, key) in enumerate(zip(graph.tasks, keys, strict=True)):
        if not _compares(task.kind):
            continue
        expected = usual[key] * share(task) / slow[key[0]]
        for step in range(len(work)):
            expected_here = expected * longer.get((step, task.kind, task.mbs), 1.0)
            result[step, i] = min(work[step, i], expected_here)  # faster than usual is no fault
    return result


def _compares(kind: Kind) -> bool:
    return kind in COMPUTE or kind == "U"


def _longer_microbatches(
    graph: TaskGraph, keys: list[Key], usual: dict[Key, float], work: NDArray[np.float64]
) -> dict[tuple[int, Kind, tuple[int, ...]], float]:
    """(step, kind, micro-batches) -> how many times as long as usual all devices took for these; 1 is left out.

    Of the devices' ratios the one nearest to 1 counts, so that no single device's disturbance looks like longer data.
    """
    on: dict[tuple[Kind, tuple[int, ...]], list[int]] = defaultdict(list)
    for i, task in enumerate(graph.tasks):
        if task.mbs and usual.get(keys[i], 0.0) > 0.0:
            on[task.kind, task.mbs].append(i)
    result = {}
    for (kind, mbs), own in on.items():
        if len({keys[i][0] for i in own}) < 2:
            continue
        typical = np.array([usual[keys[i]] * share(graph.tasks[i]) for i in own])
        ratios = work[:, own] / typical
        for step, row in enumerate(ratios):
            nearest = float(row[np.argmin(np.abs(row - 1.0))])
            if nearest != 1.0 and ((row > 1).all() or (row < 1).all()):
                result[step, kind, mbs] = nearest
    return result
