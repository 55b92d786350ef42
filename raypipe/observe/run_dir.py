"""Checks of run directories: whether a path can be one, whether it holds a run, and whether a run uses it now."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from raypipe.errors import SpecError
from raypipe.files import expanded, is_url, read_json, read_regular, write_whole
from raypipe.observe.run_log import EVENTS, METRICS, aside, mend, read_rows

CHECKPOINTS = "checkpoints"
CALLS = "calls"
"""Folder of what clients of ``raypipe serve`` have asked for."""
LOCK = ".running"
"""The lock file. It is never removed, because two processes could then lock two different files of this name."""
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems without locks."""


STOP, PAUSE, INTERRUPT = "stop", "pause", "interrupt"
"""The files that ask a run to end after the steps that it has queued, with a checkpoint; they say why. ``stop``: with a
validation, too; ``pause``: it goes on soon; ``interrupt``: its process was told to end."""
SAVE, EVALUATE = "save", "evaluate"
"""The files that ask a run for a checkpoint and for a validation, after the steps that it has queued."""
LEAVING = "leaving"
"""The file that names nodes which will go soon, one a line: Ray's id of it, its host name or its address, and after a
space the seconds until then, 30 if it says nothing."""
MOST_REASON = 4096
"""Largest size of these files, in bytes."""

RECORD = "job.json"
"""The job as it was given for the run."""
PROFILE = "profile.json"
"""The profile that the plan was made with, where the run measured it."""
SECTIONS = {"name", "model", "data", "train", "parallel"}
SHOWN = 3
"""Number of files that an error names; it counts the others."""


def place(name: str | Path, where: str = "--run-dir") -> Path:
    """Return the absolute path of a run directory; ``where`` is the option or argument that names it, for errors.

    Raises:
        SpecError: the name is empty or a URL, or it is the root or home directory, which cannot be a run directory.
    """
    if not str(name).strip():
        raise SpecError(where, "is empty", "name a directory, such as runs/first")
    if is_url(name):
        why = f"{name} is a URL, and a run directory is a path on a file system that every node sees"
        raise SpecError(where, why, "give such a path, on several nodes that of a shared file system")
    if "\0" in str(name):
        raise SpecError(where, "contains a NUL character", "name a directory, such as runs/first")
    path = expanded(Path(name)).absolute()
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError):  # a cycle of links: reported when the directory is used
        return path
    for taken, what in ((Path(resolved.anchor), "the root of the file system"), (_home(), "your home directory")):
        if resolved == taken:
            raise SpecError(where, f"{name} is {what}", f"give a directory in it: {taken / 'runs' / 'first'}")
    return path


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):
        return None


def check_own(directory: Path) -> None:
    """Refuse a directory that holds files but no run, because a run could overwrite them.

    Raises:
        SpecError: there are such files; it names some of them.
        OSError: the path is not a directory or cannot be read.
    """
    if not os.path.lexists(directory):
        return
    result = sorted(os.listdir(directory))
    if not result or is_run(directory):
        return
    shown = ", ".join(result[:SHOWN]) + (f" and {len(result) - SHOWN} more" if len(result) > SHOWN else "")
    raise SpecError(str(directory), f"holds files but no run: {shown}", "give a new or an empty --run-dir")


def is_run(directory: Path) -> bool:
    """Return whether raypipe made this directory: it has a run's lock file, valid record, events or checkpoints.

    The name of a file alone proves nothing, since other programs write a ``metrics.jsonl`` too.
    """
    if (directory / LOCK).is_file():
        return True
    try:
        job = read_json(directory / RECORD)
    except (OSError, ValueError):
        job = None
    if (isinstance(job, dict) and job.keys() >= SECTIONS) or read_rows(directory / EVENTS):
        return True
    return any((directory / CHECKPOINTS).glob("step-" + "[0-9]" * 8))


def ask(directory: Path, what: str, why: str = "") -> None:
    """Ask the run in a directory for something, by the file of that name."""
    write_whole(directory / what, f"{why}\n" if why else "")


def asked(directory: Path, what: str) -> bool:
    """Return whether the run was asked for something since the last call."""
    try:
        (directory / what).unlink()
    except FileNotFoundError:
        return False
    return True


class Stop(NamedTuple):
    """A request that a run end."""

    why: str
    pauses: bool
    """Whether the run goes on later, with another plan or when it is resumed, so that nothing is due but a save."""
    interrupts: bool = False
    """Whether the process that started the run has to end."""


def asked_to_stop(directory: Path) -> Stop | None:
    """Return why the run was asked to end; None if it was not."""
    for name in (INTERRUPT, STOP, PAUSE):
        try:
            why = read_regular(directory / name, MOST_REASON).decode(errors="replace").strip()
        except FileNotFoundError:
            continue
        except OSError as error:
            why = f"{name} {error.strerror}"
        return Stop(why, name != STOP, name == INTERRUPT)
    return None


def go_on(directory: Path) -> None:
    """Forget what the run was asked for."""
    for name in (STOP, PAUSE, INTERRUPT, SAVE, EVALUATE):
        (directory / name).unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that a new one can be written; return its new path."""
    return path.rename(aside(path))


def mend_logs(directory: Path, say: Callable[[str], None]) -> None:
    """Remove damaged lines from a run's logs before it resumes; ``say`` reports them."""
    for path in (directory / METRICS, directory / EVENTS):
        if wrong := mend(path):
            lines = f"line {wrong[0]} is" if len(wrong) == 1 else f"{len(wrong)} lines, the first {wrong[0]}, are"
            say(f"note: {path}: {lines} damaged and removed")


def stillborn(directory: Path) -> bool:
    """Return whether a run began here but left no step's metrics, no checkpoint and no client's session.

    That happens if Ray did not start or the first step failed. A directory without a run is not stillborn.
    """
    if not os.path.isfile(directory / METRICS) or read_rows(directory / METRICS):
        return False
    if any((directory / CALLS).glob("*")):
        return False
    checkpoints = directory / CHECKPOINTS
    return not checkpoints.exists() or (checkpoints.is_dir() and not any(checkpoints.iterdir()))


def put_aside(directory: Path) -> None:
    """Rename the events of a stillborn run, so that the next run's events are not appended to them."""
    events = directory / EVENTS
    if events.exists():
        number = 1
        while (aside := events.with_name(f"{events.stem}-{number}{events.suffix}")).exists():
            number += 1
        events.rename(aside)


def hold(directory: Path) -> TextIO:
    """Lock the directory for a run, until the returned file is closed or this process ends.

    Raises:
        SpecError: another run has locked it.
        OSError: the lock file cannot be written.
    """
    file = (directory / LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SpecError(
            str(directory), "another `raypipe train` is running in it", "wait for it, or give another --run-dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            file.close()
            raise
    return file
