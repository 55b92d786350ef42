"""Replay measured steps, with everything as it was or with some causes of lost time taken out.

The replay runs the same tasks in the same order. Each takes its measured time, and begins after what it depends on by
its measured gap (``gaps``), so with nothing mended the replay is the measured run. It is timed by the simulator's clock
(``schedule.walk``), one step after another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.gaps import take_apart
from raypipe.explain.measured import WORK, Measured
from raypipe.explain.mending import Mend
from raypipe.explain.step_gaps import StepGaps
from raypipe.explain.typical import undisturbed
from raypipe.explain.waits import Waits, merged, waits_of
from raypipe.schedule.deps import link
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.kinds import NETWORK
from raypipe.simulate.cyclic import CyclicGraph, Edges


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
        found = np.zeros(len(self._device), dtype=bool)
        for m in mended:
            if m.cause == cause:
                found |= True if m.where is None else self._device == m.where
        return found

    def _edges_of(self, mended: frozenset[Mend]) -> list[tuple[Edges, Edges]]:
        """Per step, what tasks wait for of their own step and of the step before."""
        if mended not in self._edges:
            links = {m.where for m in mended if m.cause == "link"}
            device = self.waits.graph.device

            def mends(p: int, i: int) -> bool:
                return None in links or (device[p], device[i]) in links

            self._edges[mended] = [self._edges_of_step(one, mends, _has_norm(mended)) for one in self.steps]
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


def _has_norm(mended: frozenset[Mend]) -> bool:
    return any(m.cause == "norm" for m in mended)
