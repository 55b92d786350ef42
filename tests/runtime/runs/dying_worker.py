"""A worker that kills its own process at a chosen moment of a step, once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from raypipe.checkpoint import ShardInfo, Snapshot, write_snapshot
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.runner import Handler
from raypipe.runtime.update.ledger import Ledger
from raypipe.runtime.worker.worker import StageWorker


def orders(file: Path) -> list[str]:
    """Rank, step, moment and count of the file; nothing if it is gone: another worker may just have died by it."""
    try:
        return file.read_text().split()
    except FileNotFoundError:
        return []


class DyingExecutor(Executor):
    """Dies before the task of a kind, after as many of that kind in the step; or where it tells the others of it."""

    file: ClassVar[Path]
    rank = -1
    count = 0
    newest: ClassVar[int] = -1
    """The newest step of this process, from 0."""

    def _die(self) -> None:
        if self.file.exists():
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def _now(self, moment: str) -> bool:
        if not (result := orders(self.file)):
            return False
        rank, step, wanted, _ = result
        return (self.rank, self.training and self.step, moment) == (int(rank), int(step), wanted)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.surround(_watched)

    def before_task(self, kind: str) -> None:
        if self._now(kind):
            self.count += 1
            if self.count > int(self.file.read_text().split()[3]):
                self._die()

    def before_updates(self, times: Any) -> None:
        if self._now("summed"):
            self._die()
        super().before_updates(times)
        if self._now("agreed"):
            self._die()

    def start(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("split", "train") == "train":
            DyingExecutor.newest = args[1]
        done = super().start(*args, **kwargs)
        if self._now("ended"):
            self._die()
        return done


def _watched(handler: Handler) -> Handler:
    def run(executor: Any, action: Any) -> None:
        executor.before_task(action.task.kind)
        handler(executor, action)

    return run


class DyingLedger(Ledger):
    """Dies right after it has told the others."""

    executor: DyingExecutor

    def start(self, share: Any) -> None:
        super().start(share)
        if self.executor._now("told"):
            self.executor._die()


def dying(file: Path) -> type[StageWorker]:
    """The class of workers of which one dies: ``file`` holds its rank, the step, the moment and a count."""

    class Dying(StageWorker):
        executor_class = type("DyingAt", (DyingExecutor,), {"file": file})
        ledger_class = DyingLedger

        @staticmethod
        def write_shard(folder: Path, name: str, snapshot: Snapshot) -> ShardInfo:
            if result := orders(file):
                rank, step, moment, _ = result
                if (name, moment) == (f"rank-{int(rank):05d}", "write"):
                    (folder / f"{name}.safetensors.partial").write_bytes(b"the first bytes")
                    while DyingExecutor.newest < int(step) + 2:  # all have begun the save, and two steps after it
                        time.sleep(0.01)
                    file.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
            return write_snapshot(folder, name, snapshot)

        def _assemble(self, *args: Any) -> None:
            super()._assemble(*args)
            self.executor.rank = self.rank  # type: ignore[attr-defined]
            if (ledger := self.executor.updates.ledger) is not None:
                ledger.executor = self.executor  # type: ignore[attr-defined]

        def pid(self) -> int:
            return os.getpid()

    return Dying
