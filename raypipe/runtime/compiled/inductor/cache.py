"""Where compiled programs are kept: torch's own cache, in raypipe's cache directory."""

from __future__ import annotations

import os
from pathlib import Path

from raypipe.graph.captured_files import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's variable for the directory of its cache; what the user has set stays as it is."""


def use_cache() -> Path:
    """Keep compiled programs below raypipe's cache directory; call it before anything is compiled. Return where."""
    return Path(os.environ.setdefault(VARIABLE, str(cache_folder().parent / "compiled")))
