"""Suspend Python's cyclic garbage collector while a large schedule is built.

A schedule is hundreds of thousands of small tuples without cycles. The collector would scan them repeatedly, which
takes most of the time at 200,000 tasks and grows faster than their number.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic collector for a block or a decorated function; reference counting still frees memory."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
