"""Callbacks of the Python API: they run in the caller's process, beside the run, and read its logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.errors import RunError
from raypipe.observe.run_dir import STOP, ask
from raypipe.observe.run_log import EVENTS, METRICS, Follower


class Callback:
    """Follows a run; override what is needed.

    The methods are called in the process that called ``train``, within about half a second and while training goes on:
    steps and validations in their order, checkpoints after the steps that were logged with them. A step that a restart
    repeats is told again.
    """

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """A step is done; ``metrics`` is its row of metrics.jsonl: ``loss``, ``grad_norm``, ``lr``, ``step_s``, ..."""

    def on_evaluate(self, step: int, metrics: dict[str, Any]) -> None:
        """A validation is done; ``metrics`` has ``val_loss``."""

    def on_save(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""

    def should_stop(self) -> bool:
        """Return whether to end the run; asked after each of the calls above.

        The run ends after the steps that are queued already, with a validation and a checkpoint.
        """
        return False


class Callbacks:
    """The callbacks of one run; call ``update`` from time to time.

    The first error of a callback ends the run in order, with a checkpoint; ``raise_error`` raises it afterwards.
    """

    def __init__(self, callbacks: Sequence[Callback], directory: Path) -> None:
        self._callbacks, self._directory = tuple(callbacks), directory
        self._metrics, self._events = Follower(directory / METRICS), Follower(directory / EVENTS)
        self._error: tuple[str, Exception] | None = None
        self._stopped = False

    def update(self) -> None:
        """Tell the callbacks what the run has logged since the last call."""
        for row in self._metrics.new_rows() if self._callbacks else ():
            self._tell("on_evaluate" if "val_loss" in row else "on_step_end", row["step"], row)
        for event in self._events.new_rows() if self._callbacks else ():
            if event["event"] == "checkpoint":
                self._tell("on_save", event["step"], Path(event["path"]))

    def raise_error(self) -> None:
        """Raise the error of a callback, if there was one.

        Raises:
            RunError: a callback failed; it names the callback and its method.
        """
        if self._error is None:
            return
        name, error = self._error
        fix = f"mend the callback; the run ended with a checkpoint in {self._directory / 'checkpoints'}"
        raise RunError(f"callbacks: {name}", f"raised {type(error).__name__}: {error}", fix) from error

    def _tell(self, method: str, *told: Any) -> None:
        for callback in self._callbacks:
            if self._error is not None:
                return
            name = f"{type(callback).__name__}.{method}"
            try:
                getattr(callback, method)(*told)
                name = f"{type(callback).__name__}.should_stop"
                stop = not self._stopped and callback.should_stop()
            except Exception as error:
                self._error, stop = (name, error), True
            if stop and not self._stopped:
                self._stopped = True
                ask(self._directory, STOP, f"{name} asked for it" if self._error is None else f"{name} failed")
