"""All devices swap their compiled stages in before the same step, once all of them have theirs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.calls import CompiledSwap


class Workers:
    """Notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def call(self, method: str, step: int) -> list[Any]:
        """Note a call."""
        self.calls.append((method, step))
        return []

    def note(self, refs: list[Any]) -> list[Any]:
        """Return the references."""
        return refs


def heard(swap: CompiledSwap, step: int, *states: str) -> None:
    results = [SimpleNamespace(compiled=(), compile_state=state, notices=(f"said in {step}",)) for state in states]
    swap.heard(step, cast(Any, results))


def test_all_devices_swap_before_the_same_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    swap, workers = CompiledSwap(log), Workers()

    def queue(step: int) -> None:
        swap.before_step(cast(Any, workers), step)

    heard(swap, 1, "compiling", "ready", "settled")
    queue(3)
    assert workers.calls == [], "one device has not compiled yet"
    heard(swap, 2, "ready", "ready", "settled")
    queue(4)
    assert workers.calls == [("swap_compiled", 4)]
    heard(swap, 3, "ready", "ready", "settled")
    heard(swap, 4, "ready", "ready", "settled")
    queue(6)
    assert len(workers.calls) == 1, "these steps were queued before the swap"
    heard(swap, 5, "settled", "settled", "settled")
    queue(7)
    heard(swap, 6, "settled", "ready", "settled")  # a replacement has compiled its stages
    queue(8)
    assert workers.calls == [("swap_compiled", 4), ("swap_compiled", 8)]
    told = [row["message"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "notice"]
    assert told == [f"said in {step}" for step in range(1, 7) for _ in range(3)]
    assert [row["step"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "swapped"] == [5, 9]
