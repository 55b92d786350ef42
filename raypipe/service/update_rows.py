"""The rows of a server's updates in the run's metrics, with the keys of a training step."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.observe.run_record import model_name
from raypipe.runtime.session.session import Outputs, Updated


@dataclass(slots=True)
class SinceUpdate:
    """What a model has done since its last update."""

    since: float = field(default_factory=time.monotonic)
    calls: int = 0
    tokens: int = 0
    loss_sum: float = 0.0

    def add(self, outputs: Outputs, trains: bool) -> None:
        """Add a call on data."""
        self.calls += 1
        self.tokens += sum(map(len, outputs.logprobs))
        if trains:
            self.loss_sum += outputs.loss_sum


class UpdateRows:
    """Adds a row for each update; one that a server which was killed has made already has its row.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: Path) -> None:
        written = read_rows(directory / METRICS) if (directory / METRICS).exists() else []
        self._written = Counter(row.get("model") for row in written)
        self._log = RunLog(directory)
        self._count = len(written)
        self._newest: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, model: str, done: SinceUpdate, updated: Updated, rate: float, queue: int) -> None:
        """Add an update of a model, which had ``done`` this since the last one and has ``queue`` requests waiting."""
        if updated.step <= self._written[model]:
            return
        self._count += 1
        step_s = max(1e-9, time.monotonic() - done.since)
        row = {
            "step": self._count,
            "model": model,
            "loss": done.loss_sum,
            "grad_norm": updated.grad_norm,
            "lr": rate,
            "step_s": step_s,
            "tokens_per_s": done.tokens / step_s,
            "bubble_ratio": updated.bubble_ratio,
            "calls": done.calls,
            "queue": queue,
            "between_calls": updated.between_calls,
        }
        self._log.metric(row)
        with self._lock:
            self._newest[model] = row

    def forget(self, model: str) -> None:
        """Forget a model that there is no more."""
        with self._lock:
            self._newest.pop(model, None)

    def newest(self) -> dict[str, dict[str, Any]]:
        """Return the newest row of each model that there is, by its short name."""
        with self._lock:
            return {model_name(row): row for row in self._newest.values()}
