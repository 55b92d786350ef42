"""Every error raypipe raises on purpose: where it is wrong, why, and what to do.

RaypipeError
├── RequestError            the request is wrong: exit status 2
│   ├── SpecError           a key, value or file of a job, cluster or profile
│   ├── CaptureError        a model that cannot be captured or cut
│   ├── ScheduleError       a schedule that cannot exist or cannot run
│   └── ClusterError        nodes that cannot work together
├── InterruptionError       the user ended it: exit status 130
└── RunError                it failed while running: exit status 1
    ├── TransportError      a message that did not come, or came wrong
    ├── DevicesError        devices that did not come free in the time that the job gives them
    ├── DeviceError         what a device's own code or its user's raised
    ├── DivergenceError     a loss, gradient or state that is no longer a number
    ├── SampleCountError    a step that left samples out, or counted some twice
    └── CheckpointError     a checkpoint that cannot be written or read back

``args`` equals the constructor's signature everywhere, so that errors survive the pickling between Ray actors.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path


class RaypipeError(Exception):
    """Base of all errors raised on purpose; ``exit_status`` is what the command line returns."""

    exit_status = 1

    def __init__(self, where: str, why: str, fix: str = "") -> None:
        super().__init__(where, why, fix)
        self.where, self.why, self.fix = where, why, fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.why}" if self.where else self.why
        return f"{head}\n  fix: {self.fix}" if self.fix else head


class RequestError(RaypipeError):
    """The user asked for something that cannot be: exit status 2, one message, no traceback."""

    exit_status = 2


class SpecError(RequestError):
    """A job, cluster, profile or plan file holds a wrong key or value."""


class CaptureError(RequestError):
    """A model whose operations cannot be read off, or cannot be cut into stages."""


class ScheduleError(RequestError):
    """A schedule that is impossible for its shape, or an order that cannot run."""


class ClusterError(RequestError):
    """Nodes of the cluster that cannot run a job together; it stays so until somebody changes them."""


class InterruptionError(RaypipeError):
    """The user ended it with Ctrl-C; says what becomes of what was done. Exit status 130, as shells have it."""

    exit_status = 130


class RunError(RaypipeError):
    """Something failed while running."""


class TransportError(RunError):
    """A message between devices did not arrive in time, or is not the one the program expects."""


class DevicesError(RunError):
    """The cluster's devices did not come free in time."""


class DeviceError(RunError):
    """An exception that is not raypipe's own, raised on one device: which device and task, and what it was.

    ``details`` is its traceback as text: the exception itself may not survive pickling, or may need the user's modules.
    ``kind`` says what it means for the run; see ``runtime.failure``.
    """

    def __init__(self, where: str, why: str, fix: str = "", details: str = "", kind: str = "bug") -> None:
        super().__init__(where, why, fix)
        self.args = (where, why, fix, details, kind)
        self.details, self.kind = details, kind


class DivergenceError(RunError):
    """Training diverged: loss, gradients or what they made of the parameters are infinite or not a number.

    Running again would do the same.
    """


class SampleCountError(RunError):
    """A step's loss is not of each sample of its mini-batch once. Running again would do the same."""


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete, damaged or from an incompatible version."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name is meant by a misspelt one.

    >>> nearest("schedul", ["schedule", "stages"])
    'did you mean "schedule"?'
    >>> nearest("zzz", ["b", "a"])
    'known: a, b'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else "known: " + ", ".join(names)


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
