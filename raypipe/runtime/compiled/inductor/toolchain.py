"""Whether this host can compile: Inductor's kernels for CPUs are C++, and what calls Triton's is C."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def missing_toolchain() -> str | None:
    """Return what this host lacks to compile stages; None if nothing."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler: {compiler} is not found"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"Python's headers are missing: there is no {header}"
    return None
