"""The callbacks that a script gives: raypipe's, Ray Train's and those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypipe.errors import SpecError
from raypipe.launch.callbacks import Callback


def by_kind(callbacks: Sequence[Any]) -> tuple[list[Callback], list[Any], list[Any]]:
    """Return raypipe's callbacks, Ray Train's, and those of transformers.

    Raises:
        SpecError: a callback is of neither kind.
    """
    from ray.train import UserCallback

    own, rays, theirs = [], [], []
    for given in callbacks:
        callback = given() if isinstance(given, type) else given
        if isinstance(callback, Callback):
            own.append(callback)
        elif isinstance(callback, UserCallback):
            rays.append(callback)
        elif hasattr(callback, "on_train_begin") and hasattr(callback, "on_step_end"):
            theirs.append(callback)
        else:
            raise SpecError(
                "callbacks", f"a {type(callback).__name__} is no callback",
                "derive it from raypipe.Callback, transformers.TrainerCallback or ray.train.UserCallback",
            )  # fmt: skip
    return own, rays, theirs


def stops_early(callback: Any) -> bool:
    """Return whether it is transformers' EarlyStoppingCallback."""
    return hasattr(callback, "early_stopping_patience")


def early_stop(callbacks: Sequence[Any]) -> dict[str, Any] | None:
    """Translate transformers' EarlyStoppingCallback to ``train.early_stop``."""
    found: dict[str, Any] | None = None
    for callback in filter(stops_early, callbacks):
        found = {
            "patience": int(callback.early_stopping_patience),
            "min_delta": float(callback.early_stopping_threshold or 0.0),
        }
    return found
