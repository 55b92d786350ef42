"""What only looks at training (prediction, calibration, planning again) must not end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Runs what looks at training; where that fails, it tells so once and leaves it out from then on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
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
            self._tell(f"{what} failed and is left out from now on; training goes on: {type(error).__name__}: {why}")
            return None
