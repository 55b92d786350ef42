"""Global batches by time to a target, as a table for the terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from raypipe.plan.time_to_target import ByTime


def as_document(found: ByTime) -> dict[str, Any]:
    """The key ``time_to_target`` of ``raypipe autoconfigure --epochs --json``; seconds are predicted."""
    rows = []
    for one in found.ranked:
        c = one.decision.best.candidate
        rows.append(
            {
                "batch": one.batch,
                "lr": one.lr,
                "epochs": one.epochs,
                "steps": one.steps,
                "predicted_step_s": one.decision.best.step_s,
                "seconds": one.seconds,
                "schedule": c.schedule,
                "stages": c.stages,
                "replicas": c.replicas,
                "microbatch": c.microbatch,
            }
        )
    return {"target": found.target, "batches": rows, "left_out": {str(b): why for b, why in found.left_out.items()}}


def batches_table(found: ByTime) -> Table:
    """A row for each global batch, the fastest to the target first."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in ("batch", "lr", "epochs", "steps", "step", f"time to {found.target:g}", "best plan"):
        table.add_column(name, justify="left" if name == "best plan" else "right")
    for one in found.ranked:
        c = one.decision.best.candidate
        plan = f"{c.schedule}, {c.stages} x {c.replicas}, micro-batches of {c.microbatch}"
        table.add_row(
            str(one.batch),
            "" if one.lr is None else f"{one.lr:.3g}",
            f"{one.epochs:.2f}",
            f"{one.steps:,.0f}",
            f"{one.decision.best.step_s:.4g} s",
            f"{one.seconds:,.4g} s",
            plan,
        )
    return table
