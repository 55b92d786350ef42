"""How much the store of compiled stages may grow: what has not been used for longest is removed first.

The kernels that the stages load lie in torch's cache beside it, which torch keeps as it sees fit; those that it lacks
are built again.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 512 * 2**20
"""Some thousands of stages: one of a four-layer GPT takes 50 to 200 KiB."""
IN_USE_S = 3600.0
"""A stage that was used within this time stays, whatever the size: a run may be about to load it."""


def note_use(folder: Path) -> None:
    """Note that a stored stage is used now; its time of change says so."""
    with suppress(OSError):  # a cache that is only read
        os.utime(folder)


def keep_within(store: Path, limit_bytes: int = LIMIT_BYTES, in_use_s: float = IN_USE_S) -> list[Path]:
    """Remove the stages that have not been used for longest until the rest takes at most ``limit_bytes``.

    Args:
        store: the folder of all stages.
        limit_bytes: bytes of all their files together.
        in_use_s: seconds; what was used since stays.

    Returns:
        The folders removed, oldest first.
    """
    stages = sorted(
        (used, size, folder) for folder in store.iterdir() if folder.is_dir() for used, size in [_use(folder)]
    )
    total = sum(size for _, size, _ in stages)
    removed = []
    for used, size, folder in stages:
        if total <= limit_bytes or used > time.time() - in_use_s:
            break
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # who holds this lock has used the stage within ``in_use_s``
            os.unlink(f"{folder}.lock")
        removed.append(folder)
        total -= size
    return removed


def _use(folder: Path) -> tuple[float, int]:
    """Return when a stage was last used, seconds since 1970, and its bytes; zeros if it is gone."""
    try:
        return folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir())
    except OSError:
        return 0.0, 0
