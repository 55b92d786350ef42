"""Failures on devices: find the error that caused the others, decide whether a restart helps, and describe it.

When a device's process dies or its code raises, its peers fail as well, with errors that only say that it is gone.
Exceptions are of three kinds:

``bug``      the same step would raise it again, so the run ends;
``memory``   an allocation failed, so the run restarts;
``lost``     a connection, a file or a device was lost, so the run restarts. Another device's error may be the cause.
"""

from __future__ import annotations

import functools
import re
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from raypipe.compat.ray_private import KILLED_FOR_MEMORY, death_of
from raypipe.errors import DeviceError, RaypipeError, RunError, TransportError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog

P = ParamSpec("P")
R = TypeVar("R")

FILE = "failure.txt"
"""File in the run's directory that holds the traceback of every failure, newest last."""
PEERS_S = 3.0
"""How long to wait for other devices to report the cause. Ray needs about one second to notice that an actor died."""

_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_LOST = re.compile(r"/gloo/|CUDA (driver )?error")
"""Errors of Gloo, and of CUDA's libraries beside its runtime, for which torch has no class."""
_RAISES = re.compile(r"raise [\w.]+\(")
"""A line that makes and raises an exception."""
_MISSING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""What a file that is not there, or not for this user, causes however often it is asked for."""
_CUDA = {2: "memory", 710: "bug"}
"""By CUDA's code: no memory, and a kernel that rejects an index, which unlike the other errors would happen again."""


def kind_of(error: BaseException) -> str:
    """Return the kind of an exception that a device's code raised: ``bug``, ``memory`` or ``lost``.

    The exceptions that it was raised from (``__cause__``) are considered as well. What the user's own line raises, with
    whatever words, and a file that is not there for it, are bugs; errors of libraries that it calls are judged by what
    they say.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, MemoryError | torch.cuda.OutOfMemoryError):
            return "memory"
        if isinstance(cause, _MISSING) and source_line(cause.__traceback__):
            return "bug"
        if isinstance(cause, RuntimeError) and _raised_by_user(cause):
            return "bug"
        if isinstance(cause, OSError | EOFError | TransportError | torch.distributed.DistError):
            return "lost"
        if isinstance(cause, torch.AcceleratorError):
            return _CUDA.get(getattr(cause, "error_code", 0), "lost")
        if isinstance(cause, RuntimeError) and not isinstance(cause, NotImplementedError | RecursionError):
            if _MEMORY.search(text):
                return "memory"
            if _LOST.search(text):
                return "lost"
        cause = cause.__cause__
    return "bug"


def breaks_device(error: BaseException) -> bool:
    """Return whether a GPU's context is broken after an exception, so that its process can use it no more.

    It is after every error of CUDA but that there is no memory.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.AcceleratorError) and _CUDA.get(getattr(cause, "error_code", 0)) != "memory":
            return True
        if isinstance(cause, RuntimeError) and re.search(r"CUDA (driver )?error", str(cause)):
            return not _MEMORY.search(str(cause))
        cause = cause.__cause__
    return False


Method = Callable[Concatenate[Any, P], R]


def raises_device_errors(method: Method[P, R]) -> Method[P, R]:
    """Wrap an actor's method to raise exceptions as DeviceError; raypipe's own errors pass unchanged.

    The actor's ``whereabouts()`` names the device and the task in the error.
    """

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except RaypipeError:
            raise
        except (Exception, SystemExit) as error:  # a SystemExit would end the actor without a word
            why = summary(error)
            raise DeviceError(self.whereabouts(), why, "", traceback.format_exc(), kind_of(error)) from None

    return run


def summary(error: BaseException) -> str:
    """Summarise an exception in one line: ``IndexError: no such row (model.py:12 in forward: ...)``."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    at = source_line(error.__traceback__)
    return f"{message} ({at})" if at else message


def source_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code, as ``file:line in function: code``; "" if there is none."""
    for frame in reversed(traceback.extract_tb(trace)):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")
    return ""


def _raised_by_user(error: BaseException) -> bool:
    """Return whether a line of the user's own code made and raised an exception, not a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_users(frames[-1].filename) and _RAISES.match(frames[-1].line or "") is not None


_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = tuple(f"{Path(folder).resolve()}/" for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib")))


def _is_users(filename: str) -> bool:
    """Return whether a source file is neither raypipe's nor an installed library's; ``<...>`` is generated code."""
    path = Path(filename).resolve()
    return not (filename.startswith("<") or _INSTALLED & set(path.parts) or str(path).startswith(_LIBRARIES))


def own_error(error: BaseException) -> BaseException:
    """Unwrap an error from Ray: return raypipe's own error inside it, else an actor's death, else ``error`` itself."""
    result: BaseException | None = None
    inner: BaseException | None = error
    while inner is not None:
        # Ray's wrapper is also an instance of the cause's class, but its message is a whole traceback.
        deeper = getattr(inner, "cause", None) or inner.__cause__
        if isinstance(inner, RaypipeError) and not isinstance(deeper, RaypipeError):
            return inner
        if isinstance(inner, RayActorError):
            result = inner
        inner = deeper
    return result or error


def is_final(error: BaseException) -> bool:
    """Return whether a restart would fail again; ``error`` is a result of ``own_error``."""
    if isinstance(error, DeviceError):
        return error.kind == "bug"
    if isinstance(error, RaypipeError):
        return not isinstance(error, TransportError)
    if isinstance(error, RayTaskError):  # a call raised what nothing has made a DeviceError
        return kind_of(error.cause) == "bug" if isinstance(error.cause, BaseException) else False
    return not isinstance(error, RayError) and kind_of(error) == "bug"


def shows_loss(error: BaseException) -> bool:
    """Return whether an error is what a worker's death causes: on itself, or on those that wait for its messages."""
    return isinstance(own_error(error), RayActorError | TransportError)


def root_cause(error: BaseException, calls: Sequence[Any]) -> BaseException:
    """Return the error that caused the others, unwrapped from Ray.

    Args:
        error: the error that was noticed first.
        calls: references of the newest calls on all workers. Waits at most ``PEERS_S`` seconds for their errors.
    """
    result = own_error(error)
    deadline = time.monotonic() + PEERS_S
    waiting = list(calls)
    while waiting and _rank(result) > 0 and (left := deadline - time.monotonic()) > 0:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=left, fetch_local=False)
        for ref in ready:
            try:
                ray.get(ref)
            except Exception as other:
                cause = own_error(other)
                result = min(result, cause, key=_rank)  # the first one where several rank equally
    return result


def _rank(error: BaseException) -> int:
    """Rank an error by how likely it is the consequence of another device's error; 0 is certainly a cause."""
    if isinstance(error, RayActorError):
        return 1
    if isinstance(error, DeviceError) and error.kind == "bug":
        # A library may report a peer's death as a RuntimeError whose text ``_LOST`` does not match.
        return 2 if error.why.startswith("RuntimeError") else 0
    if isinstance(error, DeviceError) and error.kind == "memory":
        return 0
    if isinstance(error, RaypipeError) and is_final(error):
        return 0
    return 3


def describe(error: BaseException) -> str:
    """Return the message of a failure: that of raypipe's own error inside it, or else one line."""
    cause = own_error(error)
    if isinstance(cause, RaypipeError):
        return str(cause)
    if isinstance(cause, RayActorError):
        return _death(cause)
    while (inner := getattr(cause, "controller_failure", None)) is not None:  # Ray Train's, whose text may be empty
        cause = inner
    # Ray's wrapper repeats class and message around a traceback; its cause has them once.
    return summary(getattr(cause, "cause", None) or cause)


def _death(error: RayActorError) -> str:
    """Say in one line which process died and why, as far as Ray knows; Ray's own text is a page with ids."""
    text = str(error).strip()
    died = death_of(text)
    process = f"its process (pid {died.pid}) died" if died.pid else "its process died"
    if error.preempted:
        return f"{died.name or 'a device'}: {process}: its node was taken away"
    why = died.why or (text.splitlines()[-1] if died.name is None and text else "")
    return f"{died.name or 'a device'}: {process}" + (f": {why}" if why else "")


def failure_message(error: BaseException, traceback_file: Path) -> str:
    """Describe a failure to the user: where, why, and (unless it is raypipe's own error) what to do about it.

    The error's notes follow, such as which task was the first to be stuck (``flight_recorder``).
    """
    cause = own_error(error)
    return "\n  ".join([_without_notes(cause, traceback_file), *_notes(cause)])


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def _without_notes(cause: BaseException, traceback_file: Path) -> str:
    if isinstance(cause, RaypipeError) and not isinstance(cause, DeviceError):
        return describe(cause)
    fix = f"the traceback is in {traceback_file}"
    if is_final(cause):
        fix = f"correct the model, its data or the job: a restart would fail again; {fix}"
    where = cause.where if isinstance(cause, DeviceError) else ""
    why = cause.why if isinstance(cause, DeviceError) else describe(cause)
    return str(RunError(where, why, fix))


def outside_a_run(error: BaseException, calls: Sequence[Any], where: str) -> BaseException:
    """Return the error to raise for a failure of workers that do not train, such as those of a profile.

    Args:
        error: the error that was noticed first.
        calls: as for ``root_cause``.
        where: what the workers were doing.
    """
    cause = root_cause(error, calls)
    ready = ray.wait(list(calls), num_returns=len(calls), timeout=PEERS_S, fetch_local=False)[0] if calls else []
    for ref in ready:
        with suppress(Exception):  # Ray prints the tracebacks of errors that nobody has asked for
            ray.get(ref)
    if isinstance(cause, RaypipeError) and not isinstance(cause, DeviceError):
        return cause
    if isinstance(cause, RayActorError):
        fix = "if it ran out of memory: profile smaller micro-batches, or with fewer devices per host"
        return RunError(where, f"a device died: {describe(cause)}", fix)
    if isinstance(cause, DeviceError | RayError):
        at, why = (cause.where, cause.why) if isinstance(cause, DeviceError) else (where, describe(cause))
        return RunError(at, why, "correct the model, its data or the job" if is_final(cause) else "try again")
    return error


def keep_traceback(directory: Path, error: BaseException) -> Path:
    """Append the traceback of ``error`` (a result of ``root_cause``) to the run's failure file; return its path."""
    path = directory / FILE
    if isinstance(error, DeviceError):
        text = "\n".join([error.details.rstrip(), *_notes(error)])
    else:
        text = "".join(traceback.format_exception(error))
    where = f" {error.where}" if isinstance(error, DeviceError) else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}{where}\n{text.rstrip()}\n\n")
    return path


# Have the next attempt at a run use a plan that needs less memory, where a device ran out of it.


def ran_out(cause: BaseException) -> bool:
    """Return whether a failure (a result of ``own_error``) is that of a device without memory."""
    if isinstance(cause, DeviceError):
        return cause.kind == "memory"
    return isinstance(cause, RayActorError) and KILLED_FOR_MEMORY in str(cause)


def plan_with_less(job: JobSpec, directory: Path, log: RunLog, cause: BaseException) -> None:
    """Replace the plan of the run in ``directory``; what changes, or that nothing can, is an event."""
    # Workers, which have their errors from this file, need no planner.
    from raypipe.data import known_fields
    from raypipe.models import build_model
    from raypipe.plan.plan import less_memory, load_plan

    plan = load_plan(directory / "plan.json")
    statistics = build_model(job, known_fields(directory / "data"), parallel=plan.parallel).batch_statistics
    result = less_memory(job, plan, statistics)
    if result is None:
        log.event("notice", message="a device ran out of memory, and no plan for these devices needs less")
        return
    smaller, change = result
    smaller.save(directory / "plan.json")
    log.event("out_of_memory", message=describe(cause), change=change)
