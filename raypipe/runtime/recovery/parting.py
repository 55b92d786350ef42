"""Let a worker whose call fails for the loss of another device leave its groups at once, so that no other one waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from raypipe.errors import TransportError
from raypipe.runtime.recovery.failure import kind_of

P = ParamSpec("P")
R = TypeVar("R")


def parts_when_lost(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Wrap a worker's method: where a connection is lost, the worker parts, and calls that are queued behind fail.

    So each failure shows at once where it was, and workers that live on can be set up again.
    """

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.apart:
            raise TransportError(
                self.whereabouts(), "does nothing until the lost device is replaced", "see the error that came before"
            )
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            goes_on = self.device.type == "cpu" or self.setup_data.job.train.elastic is not None
            if goes_on and kind_of(error) == "lost":
                self.part()
            raise

    return run
