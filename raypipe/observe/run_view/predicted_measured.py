"""Predicted beside measured in a few lines of text."""

from __future__ import annotations

from raypipe.observe.run_view.memory_rows import memory_rows
from raypipe.observe.run_view.run_record import RunRecord
from raypipe.plan.reasons import gib


def comparison_lines(run: RunRecord) -> list[str]:
    """Return step time, bubbles and peak memory, predicted and measured; what is not known is left out."""
    summary, predicted = run.summary(), run.last("predicted") or {}
    lines = [f"run              {run.name}: {run.state()}, {summary['steps']} steps"]
    if (measured_s := summary["measured_step_s"]) is not None:
        lines.append(f"step measured    {measured_s:.4f} s (median)")
        for word, value in (("planned", run.plan.get("predicted_step_s")), ("predicted", predicted.get("step_s"))):
            if value is not None:
                lines.append(f"step {word:<11} {value:.4f} s ({value / measured_s - 1:+.1%})")
        beside = f" (predicted {predicted['bubble_ratio']:.1%})" if predicted.get("bubble_ratio") is not None else ""
        lines.append(f"bubbles          {summary['bubble_ratio']:.1%}{beside}")
    for row in memory_rows(run):
        known = [
            f"{gib(size)} {word}"
            for size, word in ((row.planned_bytes, "planned"), (row.measured_bytes, "measured"))
            if size is not None
        ]
        lines.append(f"{row.name:<16} {', '.join(known)}")
    return lines
