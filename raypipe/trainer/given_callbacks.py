"""The callbacks that a script gives: raypipe's, Ray Train's and those of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raypipe.errors import SpecError
from raypipe.launch.callbacks import Callback


class GivenCallbacks:
    """The callbacks of a trainer, in their order.

    Args:
        callbacks: instances or classes.

    Raises:
        SpecError: one is of no kind.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self._all: list[Any] = []
        for one in callbacks:
            self.add(one)

    def add(self, callback: Any) -> None:
        """Add an instance, or one of a class.

        Raises:
            SpecError: it is of no kind.
        """
        from ray.train import UserCallback

        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, (Callback, UserCallback)) and not _is_theirs(made):
            raise SpecError(
                "callbacks",
                f"a {type(made).__name__} is no callback",
                "derive it from raypipe.Callback, transformers.TrainerCallback or ray.train.UserCallback",
            )
        self._all.append(made)

    def pop(self, callback: Any) -> Any:
        """Remove an instance, or the first one of a class, and return it; None if there is none."""
        for number, one in enumerate(self._all):
            if isinstance(one, callback) if isinstance(callback, type) else one == callback:
                return self._all.pop(number)
        return None

    @property
    def own(self) -> list[Callback]:
        """raypipe's."""
        return [one for one in self._all if isinstance(one, Callback)]

    @property
    def rays(self) -> list[Any]:
        """Ray Train's."""
        return [one for one in self._all if not isinstance(one, Callback) and not _is_theirs(one)]

    @property
    def theirs(self) -> list[Any]:
        """Those of transformers, but for its EarlyStoppingCallback."""
        return [one for one in self._all if _is_theirs(one) and not _stops_early(one)]

    @property
    def early_stop(self) -> dict[str, Any] | None:
        """``train.early_stop`` for the last EarlyStoppingCallback of transformers; None without one."""
        found: dict[str, Any] | None = None
        for one in filter(_stops_early, self._all):
            found = {
                "patience": int(one.early_stopping_patience),
                "min_delta": float(one.early_stopping_threshold or 0.0),
            }
        return found


def _is_theirs(callback: Any) -> bool:
    named = hasattr(callback, "on_train_begin") and hasattr(callback, "on_step_end")
    return named and not isinstance(callback, Callback)


def _stops_early(callback: Any) -> bool:
    return hasattr(callback, "early_stopping_patience")
