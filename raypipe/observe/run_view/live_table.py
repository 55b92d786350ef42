"""A run in a table for the terminal, made anew from its logs whenever they grow."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.observe.run_view.event_sentences import event_sentences
from raypipe.observe.run_view.run_record import RunRecord, memory_rows
from raypipe.observe.tables import text_table
from raypipe.plan.reasons import gib

STEPS, EVENTS = 10, 6
"""Newest steps and events that are shown."""
LEVELS = " .:-=+*#"
"""Of the loss curve, from low to high: plain characters, which every terminal and log file has."""
CURVE = 60
"""Width of the loss curve, in characters."""


def live_table(run: RunRecord, now: float | None = None) -> RenderableType:
    """Return what there is to see of a run.

    Args:
        run: the run's record.
        now: the time, in seconds since 1970, that ages of news are counted to; None for the clock's.
    """
    parts: list[RenderableType] = [Text(_title(run, time.time() if now is None else now), style="bold")]
    parts += [Text(f"loss  [{curve(run)}]  low '{LEVELS[1]}' to high '{LEVELS[-1]}'")] if run.steps else []
    if run.steps:
        parts.append(_steps(run))
    if devices := _devices(run):
        parts.append(devices)
    sentences = [line for event in run.events for line in event_sentences(event)]
    parts += [Text(line, style="dim") for line in sentences[-EVENTS:]]
    return Group(*parts)


def _title(run: RunRecord, now: float) -> str:
    shape = run.parallel
    plan = f": {shape.get('schedule')}, {shape.get('stages')} x {shape.get('replicas')}" if shape else ""
    done = run.steps[-1]["step"] if run.steps else 0
    of = f"/{run.planned_steps}" if run.planned_steps is not None else ""
    title = f"{run.name}{plan}; {run.state()}, step {done}{of}"
    if run.validations:
        title += f", validation loss {run.validations[-1]['val_loss']:.4f} (step {run.validations[-1]['step']})"
    if run.state() == "running" and (age := _silence_s(run, now)) is not None and age >= 1:
        title += f", last news {age:.0f} s ago"  # a run that was killed leaves no word of it
    return title


def _silence_s(run: RunRecord, now: float) -> float | None:
    times = [path.stat().st_mtime for path in run.directory.glob("*.jsonl")]
    return now - max(times) if times else None


def _steps(run: RunRecord) -> Table:
    table = text_table(("step", "loss", "grad norm", "lr", "step s", "tokens/s", "idle"))
    for row in run.steps[-STEPS:]:
        table.add_row(
            str(row["step"]),
            _number(row["loss"], ".4f"),
            _number(row.get("grad_norm"), ".3g"),
            _number(row.get("lr"), ".3g"),
            _number(row["step_s"], ".4f"),
            _number(row["tokens_per_s"], ",.0f"),
            _number(row["bubble_ratio"], ".1%"),
        )
    predicted = run.last("predicted")
    if predicted is not None:
        step_s, idle = _number(predicted.get("step_s"), ".4f"), _number(predicted.get("bubble_ratio"), ".1%")
        table.add_row("predicted", "", "", "", step_s, "", idle, style="dim")
    return table


def _devices(run: RunRecord) -> Table | None:
    started = (run.last("started") or {}).get("devices") or []
    memory = memory_rows(run)
    if not started:
        return None
    headings = ("worker", "device", "parameters", "memory planned", "memory measured")
    table = text_table(headings, left=("worker", "device"))
    for rank, device in enumerate(started):
        row = memory[rank] if rank < len(memory) else None
        sizes = [gib(size) if size is not None else "" for size in (row[1:3] if row else (None, None))]
        name, kind = str(device.get("name")), str(device.get("device"))
        table.add_row(Text(name), Text(kind), _number(device.get("parameters"), ","), *sizes)
    return table


def curve(run: RunRecord, width: int = CURVE) -> str:
    """Draw the losses in one line; each character is the mean of as many steps."""
    losses = [row["loss"] for row in run.steps if row["loss"] is not None]
    count = min(width, len(losses))
    means = []
    for n in range(count):
        part = losses[n * len(losses) // count : (n + 1) * len(losses) // count]
        means.append(sum(part) / len(part))
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(LEVELS) - 2) / (high - low) if high > low else 0.0
    return "".join(LEVELS[1 + round((mean - low) * scale)] for mean in means)


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""
