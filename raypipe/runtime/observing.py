"""What only looks at training (prediction, calibration, planning again) must not end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raypipe.observe.run_log import RunLog

P = ParamSpec("P")
T = TypeVar("T")


class Observing:
    """Runs what looks at training; where that fails, the log gets one notice and it is left out from then on."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._left_out: set[str] = set()

    def __call__(self, what: str, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What ``look(...)`` returns; None where ``what`` has failed, now or before."""
        if what in self._left_out:
            return None
        try:
            return look(*args, **kwargs)
        except Exception as error:
            self._left_out.add(what)
            why = (str(error).splitlines() or [""])[0]
            message = f"{what} failed and is left out from now on; training goes on: {type(error).__name__}: {why}"
            self._log.event("notice", message=message)
            return None
