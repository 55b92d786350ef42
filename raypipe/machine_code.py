"""Inner loops as machine code (Numba): the same Python function, a hundred times faster over flat arrays of numbers.

The code is kept beside the source, as Python keeps its bytecode, or in the user's cache directory where that cannot be
written, and made in every process where neither can. What is kept is found by the function's own file, so functions
that call each other stand in one file: a change to one of another file would not be seen.
"""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from numba import njit
from numba.core.types.misc import unliteral

from raypipe.signals import start_apart

F = TypeVar("F", bound=Callable[..., object])


_ahead: list[subprocess.Popen[bytes]] = []
"""The processes that compile ahead, until they have ended."""


def compile_ahead(*loads: Callable[[], None]) -> bool:
    """Begin to call each of ``loads``, which compile, in a process of its own: this one then finds the code kept.

    Numba takes half a minute of a core on a machine's first plan. Returns whether it is begun, now and not before.
    """
    if _ahead:
        return False
    for load in loads:
        # What is done meanwhile is wanted sooner.
        process = start_apart(f"import os; os.nice(5); from {load.__module__} import {load.__name__} as f; f()")
        if process is not None:  # else this one compiles
            _ahead.append(process)
    return bool(_ahead)


def is_kept(function: Callable[..., object]) -> bool:
    """Return whether code of a compiled function is kept, perhaps of an earlier version of its file."""
    path = getattr(getattr(function, "_cache", None), "cache_path", None)  # Numba has no public name for it
    return path is not None and any(Path(path).glob(f"*{function.__name__}-*.nbi"))


def compiling() -> bool:
    """Return whether something is being compiled ahead."""
    return any(process.poll() is None for process in _ahead)


def wait_for_ahead(say: Callable[[str], None]) -> None:
    """Wait until nothing is compiled ahead any more; if that failed, this process compiles what it calls.

    Args:
        say: called with a sentence if there is something to wait for.
    """
    while _ahead:
        process = _ahead[0]
        if process.poll() is None:
            say("compiling the planner, once on this machine")
            process.wait()
        atexit.unregister(process.kill)
        _ahead.clear()


def compiled(function: F) -> F:
    """Compile a function when it is first called, for the types that it is called with.

    Its arguments are numbers and arrays of them, and what it calls is compiled too; what has a private name is called
    by other compiled functions alone, and is not made callable from Python, which takes as long again. ``py_func`` of
    the result is the function as it was, for tests.
    """
    options = {"nogil": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": function.__name__.startswith("_")}
    try:
        machine = njit(cache=True, **options)(function)
    except RuntimeError:  # no directory to keep it in
        machine = njit(**options)(function)
    template = machine.get_call_template
    # A constant that another compiled function passes is a number like any other, and no reason to compile once more.
    machine.get_call_template = lambda args, kws: template(
        tuple(map(unliteral, args)), {name: unliteral(of) for name, of in kws.items()}
    )
    return cast("F", machine)
