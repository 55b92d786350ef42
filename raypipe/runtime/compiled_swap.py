"""The driver's part of compiled stages: it has all devices swap their programs in before the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import ray

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import compiles_first
from raypipe.job.train_spec import TrainSpec
from raypipe.observe.run_log import RunLog
from raypipe.runtime.executor.compile_report import StageReport
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.group.worker_group import WorkerGroup


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
            workers.note(workers.call("swap_compiled", step))
            self._log.event("swapped", step=step + 1)

    def _report(self, reports: Iterable[StageReport]) -> None:
        """Log what became of stages that were to be compiled."""
        for one in reports:
            self._log.event("compiled", **asdict(one))
