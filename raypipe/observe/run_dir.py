"""A run directory before and beside its run: whether anything of worth is in it, and whether a run is at work there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TextIO

from raypipe.errors import SpecError
from raypipe.observe.run_log import EVENTS, METRICS, read_rows

CHECKPOINTS = "checkpoints"
LOCK = ".running"
"""Locked, not removed: a file that comes and goes could be locked twice."""
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems without locks answer."""


def stillborn(directory: Path) -> bool:
    """Whether a run began here and left nothing that anybody could miss: no step's row and nothing of a checkpoint.

    Such is a run whose Ray did not start, or whose first step failed. A directory without a run is none.
    """
    if not os.path.isfile(directory / METRICS) or read_rows(directory / METRICS):
        return False
    checkpoints = directory / CHECKPOINTS
    return not checkpoints.exists() or (checkpoints.is_dir() and not any(checkpoints.iterdir()))


def put_aside(directory: Path) -> None:
    """Give the events of a stillborn run another name, so that the next one's are not mixed with them."""
    events = directory / EVENTS
    if events.exists():
        number = 1
        while (aside := events.with_name(f"{events.stem}-{number}{events.suffix}")).exists():
            number += 1
        events.rename(aside)


def hold(directory: Path) -> TextIO:
    """Say that a run is at work in this directory, until the file is closed or this process ends, however it does.

    Raises:
        SpecError: one is at work there already.
        OSError: no file can be written there.
    """
    file = (directory / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SpecError(
            str(directory), "another `raypipe train` is at work in it", "wait for it, or give another --run-dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            file.close()
            raise
    return file
