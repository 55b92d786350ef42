"""Show the progress of a run from its logs: a live line on a terminal, plain lines elsewhere, or a table made anew."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from raypipe.observe.run_log import EVENTS, METRICS, Follower, event_sentences, slow_devices
from raypipe.observe.run_record import RunRecord, by_model, memory_rows, model_name
from raypipe.observe.tables import text_table
from raypipe.plan.reasons import gib

UNTOLD = {"undone", "error", "interrupted"}
"""Events that progress lines leave out: an undone update is ordinary, and the command itself prints the others."""
PLAIN_EVERY_S = 5.0
"""Seconds between step lines if there is no terminal."""


class ProgressView:
    """Follows the logs of one run; call ``update`` from time to time.

    Args:
        directory: the run directory.
        steps: number of steps of the run.
        console: where to print.
        throughput: the unit that ``tokens_per_s`` counts.
        opening: lines to print when Ray is connected and the run begins.
    """

    def __init__(
        self, directory: Path, steps: int, console: Console, throughput: str = "tokens", opening: Sequence[str] = ()
    ) -> None:
        self.console = console
        self._throughput, self._opening = throughput, opening
        self._metrics, self._events = Follower(directory / METRICS), Follower(directory / EVENTS)
        self._steps = steps
        self.core_wait = CoreWait()
        self._one_host = False
        self._predicted_bubble: float | None = None
        self._last_line = 0.0
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._last: dict[str, Any] = {}
        if console.is_terminal:
            self._live = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._live.add_task("train", total=steps, line="starting")
            self._live.start()

    def skip_past(self) -> None:
        """Skip the rows that earlier attempts of a resumed run wrote."""
        list(self._metrics.new_rows())
        list(self._events.new_rows())

    def update(self) -> None:
        """Show the rows written since the last call."""
        self.core_wait.update()
        for row in self._events.new_rows():
            self._event(row)
        for row in self._metrics.new_rows():
            if "val_loss" in row:
                figures = {k.removeprefix("val_"): v for k, v in row.items() if k not in ("step", "val_loss")}
                others = "".join(f", {name} {value:.4g}" for name, value in figures.items())
                self._say(f"step {row['step']:>5}  validation loss {row['val_loss']:.4f}{others}")
            else:
                self._step(row)

    def close(self) -> None:
        """Show the last rows and stop the live line."""
        self.update()
        if self._live is not None:
            self._live.stop()

    def _event(self, row: dict[str, Any]) -> None:
        kind = row["event"]
        if kind == "run":
            self._one_host = row.get("cores") is not None
            for line in self._opening:
                self._say(line)
        elif kind == "started":
            self.core_wait.follow(device["pid"] for device in row["devices"] if self._one_host)
        elif kind == "predicted":
            self._predicted_bubble = row["bubble_ratio"]
        elif kind == "waiting":
            self._waiting(row["message"])
        if kind not in UNTOLD:
            for line in event_sentences(row):
                self._say(line)

    def _waiting(self, text: str) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, line=text)
        else:
            self._say(text)

    def _step(self, row: dict[str, Any]) -> None:
        plan = f" (plan {self._predicted_bubble:.1%})" if self._predicted_bubble is not None else ""
        line = (
            f"loss {row['loss']:.4f}  {row['step_s']:.3f} s  {row['tokens_per_s']:,.0f} {self._throughput}/s  "
            f"idle {row['bubble_ratio']:.1%}{plan}"
        )
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=row["step"], line=line)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_EVERY_S or row["step"] == self._steps:
            self._last_line = now
            left = (self._steps - row["step"]) * row["step_s"]
            self._say(f"step {row['step']:>5}/{self._steps}  {line}  {left:.0f} s left")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


class _ByClock(Progress):
    """A bar whose tasks are as far as their time."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = min(task.elapsed or 0.0, task.total or 0.0)
            task.fields["left"] = f"{(task.total or 0.0) - task.completed:.0f} s left"
        return super().get_renderables()


class Notes:
    """Notes of a command that prepares something: lines, and on a terminal a bar with the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def __call__(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, style="dim", soft_wrap=True)

    def left(self, seconds: float) -> None:
        """Show that the present work takes so many seconds more; 0 ends it, and infinity is not shown."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if 0 < seconds < math.inf and self._console.is_terminal:
            columns = BarColumn(bar_width=24), TextColumn("{task.fields[left]}")
            self._bar = _ByClock(TextColumn("measuring"), *columns, console=self._console, transient=True)
            self._bar.add_task("", total=seconds, left="")
            self._bar.start()


def stderr_console() -> Console:
    """Return a console on standard error, so that standard output contains results only."""
    return Console(file=sys.stderr)


class CoreWait:
    """Measures waiting times from Linux's scheduler statistics of each process's first thread, the one that computes.

    Call ``update`` from time to time while the processes live.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._first: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def follow(self, pids: Iterable[int]) -> None:
        """Start measuring these processes, which must run on this host; replaces the ones measured before."""
        self._first = {pid: counted for pid in pids if (counted := self._read(pid)) is not None}
        self._last = dict(self._first)

    def update(self) -> None:
        """Read the statistics again; a process that has ended keeps its last values."""
        for pid in self._first:
            if (counted := self._read(pid)) is not None:
                self._last[pid] = counted

    @property
    def share(self) -> float | None:
        """Share of a process's runnable time in which it waited for a core: the largest over processes.

        None if the kernel provides no statistics.
        """
        shares = []
        for pid, (ran, waited) in self._last.items():
            ran, waited = ran - self._first[pid][0], waited - self._first[pid][1]
            if ran + waited:
                shares.append(waited / (ran + waited))
        return max(shares, default=None)

    def _read(self, pid: int) -> tuple[int, int] | None:
        """Nanoseconds that the process ran, and that it was runnable but waited."""
        try:
            ran, waited, _ = (self._proc / str(pid) / "schedstat").read_text(encoding="ascii").split()
        except (OSError, ValueError):  # the process ended, or the kernel has no statistics
            return None
        return int(ran), int(waited)


NEWEST_STEPS, NEWEST_EVENTS, NEWEST_MODELS = 10, 6, 4
"""Newest steps and events that are shown, and models of a served run that have been updated last."""
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
    for name, rows in list(by_model(run.steps).items())[-NEWEST_MODELS:]:
        of = f" of {name}" if name else ""
        parts.append(Text(f"loss{of}  [{curve(rows)}]  low '{LEVELS[1]}' to high '{LEVELS[-1]}'"))
    if run.steps:
        parts.append(_steps(run))
    if devices := _devices(run):
        parts.append(devices)
    sentences = [line for event in run.events for line in event_sentences(event)]
    parts += [Text(line, style="dim") for line in sentences[-NEWEST_EVENTS:]]
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
    served = ("model", "calls", "queue", "between calls") if "model" in run.steps[-1] else ()
    table = text_table(("step", "loss", "grad norm", "lr", "step s", "tokens/s", "idle", *served), left=("model",))
    for row in run.steps[-NEWEST_STEPS:]:
        table.add_row(
            str(row["step"]),
            _number(row["loss"], ".4f"),
            _number(row.get("grad_norm"), ".3g"),
            _number(row.get("lr"), ".3g"),
            _number(row["step_s"], ".4f"),
            _number(row["tokens_per_s"], ",.0f"),
            _number(row["bubble_ratio"], ".1%"),
            *((model_name(row), str(row["calls"]), str(row["queue"]), f"{row['between_calls']:.1%}") if served else ()),
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
    slow, tensor = slow_devices(run.directory), max(1, int(run.parallel.get("tensor") or 1))
    for rank, device in enumerate(started):
        row = memory[rank] if rank < len(memory) else None
        sizes = [gib(size) if size is not None else "" for size in (row[1:3] if row else (None, None))]
        name, kind = str(device.get("name")), str(device.get("device"))
        kind += f", slow: {slow[rank // tensor]:.1f} x" if rank // tensor in slow else ""
        table.add_row(Text(name), Text(kind), _number(device.get("parameters"), ","), *sizes)
    return table


def curve(steps: Sequence[dict[str, Any]]) -> str:
    """Draw the losses in one line; each character is the mean of as many steps."""
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    count = min(CURVE, len(losses))
    means = []
    for n in range(count):
        part = losses[n * len(losses) // count : (n + 1) * len(losses) // count]
        means.append(sum(part) / len(part))
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(LEVELS) - 2) / (high - low) if high > low else 0.0
    return "".join(LEVELS[1 + round((mean - low) * scale)] for mean in means)


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""
