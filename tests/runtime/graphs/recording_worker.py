"""A worker on a CPU whose compiled stages, or whole steps, run as recorded graphs.

ATen operations of compiled stages run one by one, so that all are seen; the norm stays on the device, as on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raypipe.runtime.compiled.compiler import InProcess
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import StageReport
from raypipe.runtime.graphs.step_executor import StepExecutor
from raypipe.runtime.graphs.tasks import TaskGraphs
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.runtime.worker import worker
from raypipe.runtime.worker.compilation import Compilation
from raypipe.runtime.worker.worker import StageWorker
from tests.runtime.compiled.pieces import interpreted
from tests.runtime.graphs.recorded import RecordedGraphs


class RecordingWorker(StageWorker):
    """See the module."""

    def _assemble(self, *args: Any) -> None:
        self.graphs = RecordedGraphs()

        def executor_for(setup: Setup, device: object, plain: type[Executor]) -> Any:
            return partial(StepExecutor, self.graphs) if setup.job.train.cuda_graphs == "step" else plain

        worker.executor_for = executor_for
        super()._assemble(*args)

    def _shares(self, alone: bool, setup: Setup) -> Shares | DeviceShares:
        return DeviceShares(None) if alone else super()._shares(alone, setup)

    def compile_stages(self, waits: bool = False) -> list[StageReport]:
        source = InProcess.of_run(self.setup_data, self.executor, interpreted)
        self.compilation = Compilation(
            self.setup_data, self.executor, source, waits=waits, graphs=TaskGraphs(self.graphs)
        )
        return self.compilation.begin()

    def counts(self) -> tuple[int, int]:
        """Captures and replays so far."""
        return self.graphs.captures, self.graphs.replays
