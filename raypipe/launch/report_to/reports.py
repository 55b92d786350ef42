"""Hand a run's figures to its loggers while it goes on.

It reads the run's logs in the process that started the run, so no step waits for a logger, and one that fails is left
out from then on, with a notice: training goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.job.spec import JobSpec
from raypipe.launch.report_to.loggers import LOGGERS, Logger
from raypipe.launch.report_to.names import figures
from raypipe.observe.run_log import METRICS, Follower, RunLog


class Reports:
    """The loggers of one run; call ``update`` from time to time, and ``close`` at its end.

    Rows that an earlier run of the directory has logged are not told again.
    """

    def __init__(self, job: JobSpec, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._left: dict[str, None] = dict.fromkeys(job.train.report_to)
        self._open: dict[str, Logger] = {}
        self._rows = Follower(directory / METRICS)
        if self._left:
            list(self._rows.new_rows())

    def update(self) -> None:
        """Tell the loggers what the run has logged since the last call."""
        for row in self._rows.new_rows() if self._left else ():
            for name in list(self._left):
                self._try(name, self._log, name, row)

    def close(self) -> None:
        """Tell them the rest, and close them."""
        self.update()
        for name, logger in self._open.items():
            if name in self._left:
                self._try(name, logger.close)

    def _log(self, name: str, row: dict[str, Any]) -> None:
        if name not in self._open:
            self._open[name] = LOGGERS[name].make(self._job, self._directory, row["step"])
        self._open[name].log(row["step"], figures(row))

    def _try(self, name: str, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # a library that reports to others must not end training
            del self._left[name]
            why = (str(error).splitlines() or [""])[0]
            log = RunLog(self._directory)
            log.event("notice", message=f"{name} gets no more figures of this run: {type(error).__name__}: {why}")
            log.close()
