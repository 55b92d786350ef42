"""All errors that raypipe raises on purpose; each says where, why, and what to do.

RaypipeError
├── RequestError            the request is wrong: exit status 2
│   ├── SpecError           a wrong key, value or file of a job, cluster, profile or plan
│   ├── CaptureError        a model that cannot be captured or cut
│   ├── ScheduleError       a schedule that cannot exist or cannot run
│   └── ClusterError        nodes that cannot work together
├── InterruptionError       the user interrupted it: exit status 130
│   └── TerminationError    SIGTERM ended it: exit status 143
└── RunError                it failed while running: exit status 1
    ├── TransportError      a message that did not arrive, or is not the expected one
    ├── DevicesError        devices that did not become free in time
    ├── DeviceError         another exception that a device raised, in raypipe's or the user's code
    ├── DivergenceError     a loss, gradient or state that is infinite or not a number
    ├── SampleCountError    a step that left samples out or counted some twice
    └── CheckpointError     a checkpoint that cannot be written or read

``args`` always equals the constructor's signature, so that errors survive pickling between Ray actors.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path


class RaypipeError(Exception):
    """Base of all errors that raypipe raises on purpose; ``exit_status`` is that of the command line."""

    exit_status = 1

    def __init__(self, where: str, why: str, fix: str = "") -> None:
        super().__init__(where, why, fix)
        self.where, self.why, self.fix = where, why, fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.why}" if self.where else self.why
        return f"{head}\n  fix: {self.fix}" if self.fix else head


class RequestError(RaypipeError):
    """The user requested something impossible: exit status 2, one message, no traceback."""

    exit_status = 2


class SpecError(RequestError):
    """A job, cluster, profile or plan file has a wrong key or value."""


class CaptureError(RequestError):
    """A model's operations cannot be captured, or the model cannot be cut into stages."""


class ScheduleError(RequestError):
    """A schedule does not exist for its shape, or its order cannot run."""


class ClusterError(RequestError):
    """The cluster's nodes cannot run a job together until somebody changes them."""


class InterruptionError(RaypipeError):
    """The user interrupted the command with Ctrl-C. The exit status is 130, as in shells."""

    exit_status = 130


class TerminationError(InterruptionError):
    """SIGTERM ended the command. The exit status is 143, as in shells."""

    exit_status = 143


class RunError(RaypipeError):
    """Something failed while running."""


class TransportError(RunError):
    """A message between devices did not arrive in time, or is not the one that the program expects."""


class DevicesError(RunError):
    """The cluster's devices did not become free in time."""


class DeviceError(RunError):
    """A device raised an exception that is not one of raypipe's errors; the message names the device and the task.

    ``details`` is its traceback as text, because the exception itself may not be picklable or may need the user's
    modules. ``kind`` classifies it; see ``runtime.recovery.failure``.
    """

    def __init__(self, where: str, why: str, fix: str = "", details: str = "", kind: str = "bug") -> None:
        super().__init__(where, why, fix)
        self.args = (where, why, fix, details, kind)
        self.details, self.kind = details, kind


class DivergenceError(RunError):
    """Training diverged: the loss, a gradient or a parameter is infinite or not a number.

    The run is not restarted, because it would diverge again.
    """


class SampleCountError(RunError):
    """A step's loss does not count each sample of its mini-batch exactly once. The run is not restarted."""


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete, damaged or from an incompatible version."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a fix for a misspelt name: the nearest known name, or all known names.

    >>> nearest("schedul", ["schedule", "stages"])
    'did you mean "schedule"?'
    >>> nearest("zzz", ["b", "a"])
    'known: a, b'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else "known: " + ", ".join(names)


def check_known(error: type[RaypipeError], where: str, value: str, known: Collection[str]) -> None:
    """Raise ``error`` where a value is none of the known ones; the fix is the nearest of them."""
    if value not in known:
        raise error(where, f'"{value}" is unknown', nearest(str(value), known))


CLONE = Path(__file__).resolve().parents[1]
"""The folder that holds the package: a clone of the repository, or where pip puts packages."""


def shortest(path: Path) -> str:
    """The path as seen from the working directory, where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def python() -> str:
    """This interpreter, as a shell takes it."""
    return shlex.quote(shortest(Path(sys.executable)))


def install(extra: str) -> str:
    """The command that installs what ``raypipe[extra]`` needs, for this interpreter."""
    if (CLONE / "pyproject.toml").is_file():
        return f"{python()} -m pip install -e {shlex.quote(f'{shortest(CLONE)}[{extra}]')}"
    return f"{python()} -m pip install 'raypipe[{extra}]'"
