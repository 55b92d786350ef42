"""When a device runs its stages compiled.

A run starts eagerly. A thread waits for the compiled programs, which Ray tasks make (``stored``), loads them and says
so; when all devices have theirs, the driver has them swap between two steps, all before the same one. Some runs wait
for the programs before the first step instead (``job.spec.compiles_first``). A device that replaces one that died keeps
the others waiting, so there it waits for what is stored already, and compiles the rest beside the next steps.

With ``auto``, a device times some eager steps before it swaps and some compiled ones after, and keeps what is faster.
It decides that by itself, because its results are the same either way.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING

import torch

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import compiles_first, needs_compiled
from raypipe.runtime.compiled.program import CompiledStage, Outcome, swap_in
from raypipe.runtime.compiled.stored import StoredStages
from raypipe.runtime.compiled.toolchain import missing_toolchain
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import CompileState, StageReport
from raypipe.runtime.graphs.tasks import TaskGraphs, task_graphs
from raypipe.runtime.setup.setup import Setup
from raypipe.schedule.passes.sync import BY_LAYER
from raypipe.schedule.sharding import StageKey
from raypipe.tensor import current_group

if TYPE_CHECKING:
    from raypipe.runtime.compiled.compiler import InProcess

MEASURED = 5
"""Steps that each way is timed for."""


class Compilation:
    """Compiles the stages of a device and swaps them in.

    Args:
        setup: that of the device's worker.
        executor: of the device, set up.
        source: where compiled stages come from; None: the store.
        waits: whether to compile before the first step.
        replaces: whether the device takes the place of one that died.
        graphs: captures what is compiled; None: as the job says.
    """

    def __init__(
        self,
        setup: Setup,
        executor: Executor,
        source: StoredStages | InProcess | None = None,
        waits: bool = False,
        graphs: TaskGraphs | None = None,
        replaces: bool = False,
    ) -> None:
        self.executor = executor
        self._graphs = graphs if graphs is not None else task_graphs(setup, executor.settings.device)
        self.waits = waits or compiles_first(setup.job.train, setup.parallel)
        self._may_begin_eagerly = replaces and not needs_compiled(setup.job.train, setup.parallel)
        self._compares = setup.job.train.compile == "auto"
        self._refused = refusal(setup.parallel)
        self._source = source if source is not None else StoredStages(setup, executor)
        self._pending: Future[Outcome] | None = None
        self._ready: dict[StageKey, CompiledStage] = {}
        self._times: list[float] = []
        self._first = 0
        """The first step whose time counts."""
        self._eager_s: float | None = None
        self._timing = self._due = False

    @property
    def state(self) -> CompileState:
        """How far this device is."""
        if self._pending is not None or (self._timing and self._eager_s is None):
            return "compiling"
        return "ready" if self._due else "settled"

    def begin(self) -> list[StageReport]:
        """Begin to compile the stages, or compile them; return what became of those that are done."""
        if self._refused is not None:
            return [StageReport(*key, 0.0, self._refused) for key in self.executor.modules]
        refused = self._source.begin(list(self.executor.modules))
        if len(refused) == len(self.executor.modules):
            return refused
        if self.waits and not (self._may_begin_eagerly and self._source.compiles):
            reports = self._take(self._source.find())
            if self._ready and not self._compares and current_group().size == 1:
                self.swap(0)
            return [*refused, *reports]
        thread = ThreadPoolExecutor(1, thread_name_prefix="raypipe-compile")
        self._pending = thread.submit(self._source.find)
        thread.shutdown(wait=False)
        return refused

    def before_step(self, step: int) -> list[StageReport]:
        """See how far the programs are, and with ``auto`` what is faster; return what became of stages since."""
        if self._pending is not None and self._pending.done():
            outcome, self._pending = self._pending.result(), None
            self._first = step
            return self._take(outcome)
        if self._timing and len(self._times) >= MEASURED:
            taken, self._times, self._timing = median(self._times), [], False
            if self._eager_s is None:
                self._eager_s, self._due = taken, True
            elif self._slower(taken, self._eager_s):
                swap_in(self.executor, {})
                why = f"compiled, it takes {taken:.4g} s a step on its device instead of {self._eager_s:.4g} s"
                return [StageReport(*key, 0.0, why) for key in self._ready]
        return []

    def swap(self, step: int) -> list[StageReport]:
        """Run the compiled stages from ``step`` on, where there are some; return which run eagerly after all.

        All tensor ranks of a device come here together. A stage runs compiled on all of them or on none, since its
        collectives may come in another order than an eager stage's.
        """
        kept = set(self._ready) if current_group().size == 1 else self._alike()
        why = "another tensor rank runs it eagerly, or has compiled other collectives"
        reports = [StageReport(*key, 0.0, why) for key in self._ready if key not in kept]
        self._ready = {key: stage for key, stage in self._ready.items() if key in kept}
        if self._due and self._ready:
            self._swap_in()
            self._timing, self._first = self._compares, step + 1  # the first compiled step warms up
        self._due = False
        return reports

    def _alike(self) -> set[StageKey]:
        """Return the stages that all tensor ranks of the device have compiled with the same collectives."""
        keys = sorted(self.executor.modules)
        own = [self._ready[key].collectives if key in self._ready else 0 for key in keys]
        ranks = torch.stack(current_group().all_gather(torch.tensor(own, device=self.executor.settings.device)))
        alike = ((ranks == ranks[0]) & (ranks != 0)).all(0).tolist()
        return {key for key, one in zip(keys, alike, strict=True) if one}

    def _slower(self, compiled_s: float, eager_s: float) -> bool:
        """Return whether compiled steps take longer, over all tensor ranks of the device."""
        times = torch.tensor([compiled_s, eager_s], dtype=torch.float64, device=self.executor.settings.device)
        total = torch.stack(current_group().all_gather(times)).sum(0)
        return bool(total[0] > total[1])

    def _swap_in(self) -> None:
        captures = self._graphs
        swap_in(self.executor, self._ready if captures is None else captures.captured(self.executor, self._ready))

    def go_on(self, executor: Executor) -> None:
        """Go on with another executor of the same stages."""
        runs = bool(self.executor.computation.compiled)
        self.executor = executor
        if runs:
            self._swap_in()

    def notices(self) -> tuple[str, ...]:
        """Return what there is to say of tasks that are not captured, once."""
        return () if self._graphs is None else self._graphs.take_notes()

    def after_step(self, step: int, seconds: float) -> None:
        """Note how long the tasks of a step took on this device."""
        if self._timing and step >= self._first:
            self._times.append(seconds)

    def close(self) -> None:
        """Give up what is under way."""
        self._source.close()

    def _take(self, outcome: Outcome) -> list[StageReport]:
        self._ready = {key: compiled for key, compiled, _ in outcome if compiled is not None}
        self._timing = bool(self._ready) and self._compares
        self._due = bool(self._ready) and not self._compares
        return [report for _, _, report in outcome]


def refusal(parallel: ParallelSpec) -> str | None:
    """Return why no stage of a run can be compiled; None if some can."""
    if parallel.sub_pipelined:
        return "halves of a micro-batch take turns at collectives (parallel.sub_pipelined), and programs take it whole"
    if parallel.sync in BY_LAYER:
        return f"parallel.sync: {parallel.sync} updates layer by layer, and a compiled forward runs all layers at once"
    if parallel.side_stream is not None:
        return "nobody has tried compiled stages with parallel.side_stream"
    return missing_toolchain()
