"""Call the workers: which steps the next call holds, what is due after them, and the ticket of what it returns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray

from raypipe.data import known_fields, open_data, token_budget
from raypipe.data.packed import Packed
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec, compiles_first
from raypipe.job.train_spec import TrainSpec
from raypipe.models import build_model
from raypipe.observe.run_dir import EVALUATE, SAVE, Stop, asked
from raypipe.observe.run_log import RunLog
from raypipe.plan.online.better_order import Running
from raypipe.plan.online.measured_steps import StepClock
from raypipe.runtime.executor.step import MOST_STEPS, StageReport, StepResult
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies
from raypipe.runtime.saving.saves import Save, Saves
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.schedule.microbatch_order import BUDGET_S, Order, OrderSearch


class Due(NamedTuple):
    """The work that follows a step before the next one."""

    evaluates: bool
    saves: bool
    copies: bool

    @property
    def anything(self) -> bool:
        """Return whether devices do anything but the next step, so that an asynchronous pipeline drains."""
        return any(self)


class StepsToQueue(NamedTuple):
    """The steps of the next call."""

    parts: Sequence[Part]
    """How each begins and ends."""
    due: Due
    """After the last one."""


class Dues:
    """Says what is due in one attempt at a run."""

    def __init__(self, train: TrainSpec, directory: Path, saves: Saves, copies: NeighbourCopies) -> None:
        self._train, self._directory, self._saves, self._copies = train, directory, saves, copies

    def after(self, done: int, stop: Stop | None) -> Due:
        """Return what is due after ``done`` steps; ``stop``: what ends the run there, or None.

        A save or a validation that was asked for from outside is due once: after the step that this is called for.
        """
        train = self._train
        last = done == train.steps or (stop is not None and not stop.pauses)
        evaluates = asked(self._directory, EVALUATE) or last or bool(train.eval_every and done % train.eval_every == 0)
        forced = asked(self._directory, SAVE) or last or stop is not None or self._saves.overdue
        saves = forced or bool(train.checkpoint_every and done % train.checkpoint_every == 0)
        return Due(evaluates, saves, self._copies.due(done))

    def next_call(self, done: int, most: int, fills: bool, flushes: bool, stop: Stop | None) -> StepsToQueue:
        """Return the steps that follow ``done`` ones: up to the first after which anything is due.

        Args:
            done: number of steps queued so far.
            most: steps that one call may hold.
            fills: whether an asynchronous pipeline is empty by then.
            flushes: whether every step empties the pipeline.
            stop: what ends the run after the next step, or None.
        """
        parts: list[Part] = []
        while True:
            due = self.after(done + len(parts) + 1, stop)
            parts.append(WHOLE if flushes else (fills, due.anything))
            fills = due.anything
            if due.anything or len(parts) >= most:
                return StepsToQueue(parts, due)


# A ticket: one call that the driver has queued with every worker, and whose results it has yet to collect.


class DoneStep(NamedTuple):
    """One step of a call, with what came back."""

    step: int
    """Its number, from 1."""
    part: Part
    results: list[StepResult | None]
    """By rank; None where a result was lost with its worker."""


@dataclass(slots=True)
class Ticket:
    """Some steps, a validation, a save or a copy."""

    kind: Literal["step", "eval", "save", "copy"]
    step: int
    """Number of steps done when this call has finished."""
    refs: list[Any]
    clock: StepClock
    parts: Sequence[Part] = ()
    """How each of its steps begins and ends."""
    save: Save | None = None

    def steps(self, results: Sequence[Sequence[StepResult] | None]) -> list[DoneStep]:
        """Return its steps; ``results``: by rank, those of all of them, or None where they were lost."""
        first = self.step - len(self.parts)
        return [
            DoneStep(first + k + 1, part, [None if of_rank is None else of_rank[k] for of_rank in results])
            for k, part in enumerate(self.parts)
        ]

    def reports(self, results: Sequence[Any]) -> list[Any]:
        """Return what each worker reports beside its steps, as writes that have ended: it comes with the last one."""
        if self.kind != "step":
            return list(results)
        return [None if of_rank is None else of_rank[-1] for of_rank in results]


# How many steps go into one call of the workers.
#
# A call costs about a millisecond in which a device computes nothing, and as much of a processor's time again in the
# driver, which shares the host's cores with CPU devices. So short steps are asked for together: as many as take
# ``CALL_S``. Their results, and what follows from them (a log line, another plan, a stop), come that much later.
# Nothing else may lie between two steps of a call: the driver ends a call before a validation, a save or a copy.

CALL_S = 0.1
"""Longest call of several steps."""
MEASURED = 3
"""Newest steps of which the longest counts, so that one that seems short does not make a call long."""


class StepsPerCall:
    """Follows the time that steps take."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=MEASURED)

    def took(self, step_s: float) -> None:
        """Note how long a step took, in seconds."""
        self._newest.append(step_s)

    def forget(self) -> None:
        """Begin again, because steps may take another time from now on."""
        self._newest.clear()

    @property
    def step_s(self) -> float | None:
        """Seconds of the shortest of the newest steps; None if none is known."""
        return min(self._newest, default=None)

    @property
    def most(self) -> int:
        """Steps that the next call may hold.

        >>> calls = StepsPerCall()
        >>> for step_s in (0.024, 0.015, 0.02):
        ...     calls.took(step_s)
        >>> calls.most
        4
        """
        if len(self._newest) < MEASURED:
            return 1
        return max(1, min(MOST_STEPS, int(CALL_S / max(self._newest))))


# Which of a step's unequal micro-batches of packed documents goes first is searched while devices run the steps before.
#
# The driver knows the time of every row from the lengths of documents alone, and sends with a step what differs from
# the data's own order. Programs do not change.

SHARE = 0.25
"""Of the time of a step, what the search for one may take at most; the driver shares processors with devices."""
REMEMBERED = 64
"""Steps whose orders are kept, more than are ever queued: one that is repeated for a replaced worker has the same."""


class RowOrders:
    """Orders of the micro-batches of a run's steps.

    Args:
        job: the job.
        data: folder of its prepared data.
    """

    def __init__(self, job: JobSpec, data: Path) -> None:
        self._job, self._data = job, data
        self._rows: Packed | None = None
        self._search: tuple[Schedule, OrderSearch] | None = None
        self._known: dict[int, Order | None] = {}

    def of(self, running: Running, steps: range, left_out: int, step_s: float | None) -> dict[int, Order]:
        """Return the orders of some steps, without those that are the data's own.

        Args:
            running: the plan and the schedule of these steps.
            steps: the steps, from 0.
            left_out: mini-batches of the training data that are not used.
            step_s: seconds of a step, if known.
        """
        # An asynchronous program runs micro-batches of the next step too, whose order is not known yet.
        if self._job.train.tokens_per_step is None or running.schedule.versions != "flush":
            return {}
        budget_s: float | None = BUDGET_S if step_s is None else min(BUDGET_S, SHARE * step_s)
        if self._job.train.deterministic:  # of gradients, not even the order of summing may depend on a clock
            budget_s = None
        for step in steps:
            if step not in self._known:
                times = self._times(running, step + left_out)
                self._known[step] = self._searched(running).best(times, step, budget_s)
        for old in [step for step in self._known if step < steps.start - REMEMBERED]:
            del self._known[old]
        return {step: order for step in steps if (order := self._known[step]) is not None}

    def forget(self) -> None:
        """Search again, because the run goes back and leaves out data, or has another plan."""
        self._known.clear()

    def _times(self, running: Running, at: int) -> list[float]:
        """Return the predicted time of each micro-batch of a mini-batch."""
        if self._rows is None:
            model = build_model(self._job, known_fields(self._data), 0, running.plan.parallel)
            budget = token_budget(self._job, running.plan.parallel.sample_copies, model)
            rows = open_data(self._data, model.task, budget=budget)
            assert isinstance(rows, Packed)
            self._rows = rows
        train, each = self._job.train, running.plan.parallel.microbatch
        times = self._rows.times("train", train.seed, at)
        return [math.fsum(times[i : i + each]) for i in range(0, len(times), each)]

    def _searched(self, running: Running) -> OrderSearch:
        if self._search is None or self._search[0] is not running.schedule:
            costs = CostTable.even(running.schedule.stages)
            parallel = running.plan.parallel
            self._search = (
                running.schedule,
                OrderSearch(running.schedule, costs, parallel.replicas, parallel.context),
            )
        return self._search[1]


class CompiledSwap:
    """Follows the devices' compilation by what they report of each step, and logs it."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._due = False
        """Whether all devices wait for the swap."""
        self._swapped = 0
        """Number of steps that had been queued at the newest swap: what they report is from before it."""

    def begin(self, workers: WorkerGroup, train: TrainSpec, parallel: ParallelSpec) -> dict[int, list[str]]:
        """Have the workers compile their stages, all at the same time, as far as ``train.compile`` says.

        Returns, per rank all of whose stages run compiled already, the matrices whose gradients are computed in B.
        """
        self._due, self._swapped = False, 0
        if train.compile == "none":
            return {}
        waits = compiles_first(train, parallel)
        self._log.event("compiling", beside=not waits)
        ranks = {ref: rank for rank, ref in enumerate(workers.call("compile_stages", waits))}
        found: dict[int, list[str]] = {}
        left = list(ranks)
        while left:
            done, left = ray.wait(left)
            for ref in done:
                reports = ray.get(ref)
                self._report(reports)
                if reports and all(one.reason is None for one in reports):
                    found[ranks[ref]] = [name for one in reports for name in one.in_input_grad]
        if waits and parallel.tensor > 1:  # whose ranks swap together
            workers.call("swap_compiled", 0)
        return found

    def heard(self, step: int, results: Sequence[StepResult]) -> None:
        """Take in what the devices say of the step that is the ``step``-th."""
        self._report(report for result in results for report in result.compiled)
        for notice in (notice for result in results for notice in result.notices):
            self._log.event("notice", message=notice)
        states = {result.compile_state for result in results}
        self._due = step > self._swapped and "ready" in states and "compiling" not in states

    def before_step(self, workers: WorkerGroup, step: int) -> None:
        """Swap before step ``step``, counted from 0, if it is time to; that step is queued next."""
        if self._due:
            self._due, self._swapped = False, step
            workers.call("swap_compiled", step)
            self._log.event("swapped", step=step + 1)

    def _report(self, reports: Iterable[StageReport]) -> None:
        """Log what became of stages that were to be compiled."""
        for one in reports:
            self._log.event("compiled", **asdict(one))
