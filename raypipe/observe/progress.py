"""Show the progress of a run from its logs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from raypipe.observe.core_wait import CoreWait
from raypipe.observe.run_log import EVENTS, METRICS, Follower
from raypipe.observe.run_view.event_sentences import event_sentences

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
