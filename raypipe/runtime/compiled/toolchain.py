"""Find the compiler that Inductor needs: its kernels for CPUs are C++, and what calls Triton's is C."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from raypipe.capture.captured import cache_folder


def missing_toolchain() -> str | None:
    """Return what this host lacks to compile stages; None if nothing."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler: {compiler} is not found"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"Python's headers are missing: there is no {header}"
    return None


# Where compiled programs are kept: torch's own cache, in raypipe's cache directory.

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's variable for the directory of its cache; what the user has set stays as it is."""


def use_cache() -> Path:
    """Keep compiled programs below raypipe's cache directory; call it before anything is compiled. Return where."""
    return Path(os.environ.setdefault(VARIABLE, str(cache_folder().parent / "compiled")))
