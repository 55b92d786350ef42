"""When a device compiles its stages: before the first step, or beside the first steps, which then run eagerly.

With ``auto``, the stages are traced at once and compiled in a thread. When that has ended, the device times some eager
steps, swaps the programs in between two steps, times some of those, and keeps what is faster. Each device decides by
itself, because its results are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.runtime.compiled.compiler import Build, StageCompiler, TracedStage, swap_in
from raypipe.runtime.compiled.inductor import compile_graph
from raypipe.runtime.compiled.report import StageReport
from raypipe.runtime.compiled.stage import CompiledStage
from raypipe.runtime.compiled.toolchain import missing_toolchain
from raypipe.runtime.executor import Executor
from raypipe.runtime.setup import Setup
from raypipe.runtime.update.gradients import StageKey
from raypipe.schedule.passes.sync import BY_LAYER

MEASURED = 5
"""Steps that each way is timed for."""

Outcome = list[tuple[CompiledStage | None, StageReport]]


class Compilation:
    """Compiles the stages of a device and swaps them in.

    Args:
        setup: that of the device's worker.
        executor: of the device, set up.
        build: compiles one graph.
    """

    def __init__(self, setup: Setup, executor: Executor, build: Build = compile_graph) -> None:
        self.executor = executor
        self._beside = setup.job.train.compile == "auto"
        self._refused = refusal(setup.job.parallel)
        budget = setup.job.parallel.activation_memory_budget
        self._compiler = StageCompiler(executor, tuple(setup.train.values()), setup.done, budget, build)
        self._keys: list[StageKey] = []
        self._pending: Future[Outcome] | None = None
        self._ready: dict[StageKey, CompiledStage] = {}
        self._times: list[float] = []
        self._first = 0
        """The first step whose time counts."""
        self._eager_s: float | None = None
        self._timing = False

    def begin(self) -> list[StageReport]:
        """Compile the stages, or with ``auto`` begin to; return what became of those that are done."""
        if self._refused is not None:
            return [StageReport(*key, 0.0, self._refused) for key in self.executor.modules]
        found = [self._compiler.trace(key) for key in self.executor.modules]
        traced = [one for one in found if isinstance(one, TracedStage)]
        reports = [one for one in found if isinstance(one, StageReport)]
        if not self._beside:
            outcome = self._compile(traced)
            swap_in(self.executor, {one.key: ready for one, (ready, _) in zip(traced, outcome, strict=True) if ready})
            return [*reports, *(report for _, report in outcome)]
        if traced:
            self._keys = [one.key for one in traced]
            with_thread = ThreadPoolExecutor(1, thread_name_prefix="raypipe-compile")
            self._pending = with_thread.submit(self._compile, traced)
            with_thread.shutdown(wait=False)
        return reports

    def before_step(self, step: int) -> list[StageReport]:
        """Swap programs in or out before a step, if it is time to; return what has been compiled since."""
        if self._pending is not None and self._pending.done():
            outcome, self._pending = self._pending.result(), None
            self._ready = {key: ready for key, (ready, _) in zip(self._keys, outcome, strict=True) if ready}
            self._timing, self._first = bool(self._ready), step
            return [report for _, report in outcome]
        if self._timing and len(self._times) >= MEASURED:
            taken, self._times = median(self._times), []
            if self._eager_s is None:
                self._eager_s, self._first = taken, step + 1  # the first compiled step warms up
                swap_in(self.executor, self._ready)
            else:
                self._timing = False
                if taken > self._eager_s:
                    swap_in(self.executor, {})
                    why = f"compiled, it takes {taken:.4g} s a step on its device instead of {self._eager_s:.4g} s"
                    return [StageReport(*key, 0.0, why) for key in self._ready]
        return []

    def after_step(self, step: int, seconds: float) -> None:
        """Note how long the tasks of a step took on this device."""
        if self._timing and step >= self._first:
            self._times.append(seconds)

    def _compile(self, traced: Sequence[TracedStage]) -> Outcome:
        return [self._compiler.compile(one) for one in traced]


def refusal(parallel: ParallelSpec) -> str | None:
    """Return why no stage of a run can be compiled; None if some can."""
    if parallel.tensor > 1:
        return "its layers are divided over tensor ranks, whose collectives cannot be compiled yet"
    if parallel.sync in BY_LAYER:
        return f"parallel.sync: {parallel.sync} updates layer by layer, and a compiled forward runs all layers at once"
    if parallel.side_stream is not None:
        return "nobody has tried compiled stages with parallel.side_stream"
    return missing_toolchain()
