"""A choice of a plan on the command line: its progress, and signals that end it with the best plan so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from raypipe.observe.tables import seconds
from raypipe.plan.watch import SearchProgress, Watch
from raypipe.search.budget import Budget
from raypipe.signals import ended_by, waiting

PLAIN_EVERY_S = 3.0
"""Seconds between lines if there is no terminal."""
AT_ONCE_S = 1.0
"""Seconds after which the first one is due."""


@contextmanager
def watched(budget: Budget, console: Console) -> Iterator[Watch]:
    """Yield a watch that shows a choice's progress, and ends it on Ctrl-C and SIGTERM once there is a plan.

    Args:
        budget: of the whole choice.
        console: where to print.
    """
    with waiting() as received:
        view = _View(console)

        def stop() -> bool:
            number = received()
            if number is not None and not view.found:
                raise ended_by(number)
            return number is not None

        try:
            yield Watch(budget, view.show, stop)
        finally:
            view.close()
        if received() is not None:
            console.print("ended early: the best plan so far", style="dim")


class _View:
    """A bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.best_s = float("inf")
        self._console = console
        self._next = time.monotonic() + AT_ONCE_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("planning"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[line]}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=1.0, line="")
            self._bar.start()

    @property
    def found(self) -> bool:
        """Return whether there is a plan."""
        return self.best_s < float("inf")

    def show(self, planned: SearchProgress) -> None:
        """Show how far the choice is, and the first plan at once: the bar is full when the bound has reached the best.

        What is tried beside the best plans has progress of its own, which knows none of them.
        """
        if not self.found and planned.best_s < float("inf"):
            self._next = time.monotonic()
        self.best_s = min(self.best_s, planned.best_s)
        bound_s = min(self.best_s, planned.bound_s)
        line = f"{planned.left:,} candidates left, " + (
            f"best {seconds(self.best_s)}, at least {seconds(bound_s)}" if self.found else "no plan yet"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=bound_s / self.best_s if self.found else 0.0, line=line)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_EVERY_S
            self._console.print(f"planning: {line}", highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
