"""Memory per device of a run: what the plan expected, what was measured, and the limit."""

from __future__ import annotations

from typing import Any, NamedTuple

from raypipe.observe.run_view.run_record import RunRecord


class MemoryRow(NamedTuple):
    """One device, or with tensor parallelism one rank of it."""

    name: str
    planned_bytes: float | None
    """Of the planner's prediction; None if the plan was given."""
    measured_bytes: float | None
    """Peak of the whole run; None until the run has finished."""
    limit_bytes: float | None


def memory_rows(run: RunRecord) -> list[MemoryRow]:
    """Return a row per rank; empty if memory was neither planned nor measured.

    The planner predicts one data-parallel copy of D devices; device ``w * D + d`` of copy ``w`` has device ``d``'s
    prediction.
    """
    decision, finished = run.last("planned") or {}, run.last("finished") or {}
    chosen: dict[str, Any] = next(iter(decision.get("candidates") or []), {})
    planned, measured = chosen.get("memory_bytes") or [], finished.get("memory_bytes") or []
    tensor = run.parallel.get("tensor") or 1
    count = len(measured) or len(planned) * (run.parallel.get("replicas") or 1) * tensor
    rows = []
    for rank in range(count):
        device = rank // tensor
        name = f"device {device}" + (f", tensor rank {rank % tensor}" if tensor > 1 else "")
        expected = planned[device % len(planned)] if planned else None
        rows.append(MemoryRow(name, expected, measured[rank] if measured else None, chosen.get("capacity_bytes")))
    return rows
