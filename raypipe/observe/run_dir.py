"""A run directory before and beside its run: whether anything of worth is in it, and whether a run is at work there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from raypipe.errors import SpecError
from raypipe.files import expanded, is_url, read_regular
from raypipe.observe.run_log import EVENTS, METRICS, aside, mend, read_rows

CHECKPOINTS = "checkpoints"
LOCK = ".running"
"""Locked, not removed: a file that comes and goes could be locked twice."""
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems without locks answer."""


RECORD = "job.json"
"""The job, as the run was asked for."""
SECTIONS = {"name", "model", "data", "train", "parallel"}
SHOWN = 3
"""Files that an error names; of more it says how many."""


def place(name: str | Path, where: str = "--run-dir") -> Path:
    """The absolute path of a run directory that somebody named; ``where`` is what they named it with.

    Raises:
        SpecError: an empty name, a URL, or a directory that no run can have to itself.
    """
    if not str(name).strip():
        raise SpecError(where, "is empty", "name a directory, such as runs/first")
    if is_url(name):
        why = f"{name} is a URL, and a run directory is a path on a file system that every node sees"
        raise SpecError(where, why, "give such a path, on several nodes that of a shared file system")
    if "\0" in str(name):
        raise SpecError(where, "holds a NUL character, which no path does", "name a directory, such as runs/first")
    path = expanded(Path(name)).absolute()
    try:
        whole = path.resolve()
    except (OSError, RuntimeError):  # links that lead in a circle: said when it is used
        return path
    for taken, what in ((Path(whole.anchor), "the root of the file system"), (_home(), "your home directory")):
        if whole == taken:
            raise SpecError(where, f"{name} is {what}", f"give a directory in it: {taken / 'runs' / 'first'}")
    return path


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):
        return None


def check_own(directory: Path) -> None:
    """Refuse a directory that holds files and is no run's: a run would write over some of them.

    Raises:
        SpecError: naming some of the files.
        OSError: it is no directory, or cannot be read.
    """
    if not os.path.lexists(directory):
        return
    found = sorted(os.listdir(directory))
    if not found or is_run(directory):
        return
    shown = ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    raise SpecError(str(directory), f"holds files that are no run's: {shown}", "give a new or an empty --run-dir")


def is_run(directory: Path) -> bool:
    """Whether raypipe made this directory: it has a run's lock, or a record, events or checkpoints as runs write.

    A file of that name alone says nothing: other programs write a ``metrics.jsonl`` too.
    """
    if (directory / LOCK).is_file():
        return True
    try:
        job = json.loads(read_regular(directory / RECORD))
    except (OSError, ValueError, RecursionError):
        job = None
    if (isinstance(job, dict) and job.keys() >= SECTIONS) or read_rows(directory / EVENTS):
        return True
    return any((directory / CHECKPOINTS).glob("step-" + "[0-9]" * 8))


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that the next one is made anew; returns its new name."""
    return path.rename(aside(path))


def mend_logs(directory: Path, say: Callable[[str], None]) -> None:
    """Leave damaged lines out of a run's logs before it goes on; ``say`` is told of them."""
    for path in (directory / METRICS, directory / EVENTS):
        if wrong := mend(path):
            lines = f"line {wrong[0]} is" if len(wrong) == 1 else f"{len(wrong)} lines, the first {wrong[0]}, are"
            say(f"note: {path}: {lines} damaged and left out")


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
