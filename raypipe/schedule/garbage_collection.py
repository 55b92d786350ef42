"""Keep Python's cycle collector out of the way while a large schedule is built.

A schedule is hundreds of thousands of small tuples without cycles; the collector walks over all of them again and
again as they are made, which is most of the time at 200,000 tasks and grows faster than they do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch the cycle collector off for the body (also as a decorator); reference counts free memory as always."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
