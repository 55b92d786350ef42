"""Inner loops as machine code (Numba): the same Python function, a hundred times faster over flat arrays of numbers.

The code is kept beside the source, as Python keeps its bytecode, or in the user's cache directory where that cannot be
written, and made in every process where neither can. What is kept is found by the function's own file, so functions
that call each other stand in one file: a change to one of another file would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile a function when it is first called, for the types that it is called with.

    Its arguments are numbers and arrays of them, and what it calls is compiled too. ``function.py_func`` of the result
    is the function as it was, for tests.
    """
    try:
        machine = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no directory to keep it in
        machine = njit(nogil=True)(function)
    return cast("F", machine)
