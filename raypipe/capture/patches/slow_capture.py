"""Say which module a long capture is in.

A loop over a sequence is traced turn by turn, and symbolic sizes make some models slow to trace.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

FIRST_S = 60.0
"""Seconds until it is said for the first time; then after twice as long each time."""


@contextmanager
def told_if_slow(module: nn.Module, notify: Callable[[str], None], first_s: float = FIRST_S) -> Iterator[None]:
    """Call ``notify`` when the block has taken ``first_s`` seconds, and again after twice as long each time."""
    done, tracing, began = threading.Event(), threading.get_ident(), time.monotonic()
    paths = {id(part): path for path, part in module.named_modules() if path}

    def watch() -> None:
        wait = first_s
        while not done.wait(wait):
            where = _innermost(tracing, paths)
            inside = f"is in module {where} now: model.as_it_is runs it as it is, without" if where else "goes on"
            notify(f"the model is being captured, which has taken {time.monotonic() - began:.0f} s and {inside}")
            wait *= 2

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _innermost(thread: int, paths: dict[int, str]) -> str:
    """Return the path of the innermost module that a thread is calling; "" if there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        found = paths.get(id(frame.f_locals.get("self")))
        if found is not None:
            return found
        frame = frame.f_back
    return ""
