"""When a choice ends before it has tried everything: its time is up, or somebody asks; and what it shows till then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raypipe.search.budget import Budget


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a choice is."""

    left: int
    """Grids and candidates that wait."""
    best_s: float
    """The shortest step found; infinite before there is one."""
    bound_s: float
    """No plan has a shorter step."""


Show = Callable[[SearchProgress], None]
EVERY_S = 0.1
"""Seconds between two looks at the progress."""


@dataclass(slots=True)
class Watch:
    """Ends a choice, and shows its progress.

    Args:
        budget: of the whole choice.
        show_progress: called from time to time.
        stop: returns whether somebody asks it to end with what it has.
        whole: the watch that this is a part of.
    """

    budget: Budget
    show_progress: Show = lambda progress: None
    stop: Callable[[], bool] = lambda: False
    whole: Watch | None = None
    first_plan: float | None = field(default=None, init=False)
    """When the first plan was found, on this host's monotonic clock; None before."""
    _shown: float = field(default=0.0, init=False)
    _best_s: float = field(default=float("inf"), init=False)

    @property
    def over(self) -> bool:
        """Return whether to end with what is found."""
        return self.stop() or self.budget.left <= 0

    def share(self, share: float, most: float = float("inf")) -> float:
        """Return such a share of the seconds left, at most ``most``; 0 at the end."""
        return 0.0 if self.over else min(most, share * self.budget.left)

    def part(self, share: float) -> Watch:
        """Return a watch over a part of the choice that may take such a share of the time left."""
        left = self.budget.left
        return self if left == float("inf") else Watch(self.budget.part(share), self.show_progress, self.stop, self)

    def found_plan(self) -> None:
        """Note that there is a plan."""
        if self.first_plan is None:
            self.first_plan = time.monotonic()
            if self.whole is not None:
                self.whole.found_plan()

    def show(self, best_s: float, progress: Callable[[], SearchProgress]) -> None:
        """Show how far the choice is: a better plan at once, all else from time to time."""
        now = time.monotonic()
        if best_s < float("inf"):
            self.found_plan()
        if best_s < self._best_s or now - self._shown >= EVERY_S:
            self._shown, self._best_s = now, best_s
            self.show_progress(progress())


BUDGET_S = 10.0
"""Seconds for a whole choice where nobody says how many."""
ENDLESS = Watch(Budget(float("inf")))
"""Nothing ends the choice."""
