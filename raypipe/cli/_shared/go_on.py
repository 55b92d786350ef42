"""Advice on resuming a run that ended before its last step."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from raypipe.errors import python, shortest
from raypipe.observe.run_dir import CHECKPOINTS, stillborn
from raypipe.observe.run_log import METRICS


def program() -> str:
    """Return how to call this program: ``raypipe`` if the shell finds it, otherwise this interpreter's module.

    >>> program() in ("raypipe", f"{python()} -m raypipe")
    True
    """
    return "raypipe" if shutil.which("raypipe") else f"{python()} -m raypipe"


def resume_command(job: Path, directory: Path, overrides: Sequence[str], plan: Path | None) -> str:
    """Return the command line that resumes a run with the options of the command that started it."""
    arguments = ["train", str(job), *(argument for text in overrides for argument in ("--set", text))]
    arguments += ["--plan", str(plan)] if plan is not None else []
    return f"{program()} {shlex.join([*arguments, '--run-dir', shortest(directory)])} --resume"


def advice(directory: Path, command: str) -> str:
    """Return how to continue a run that was interrupted or failed; "" if it trained no step."""
    if stillborn(directory) or not (directory / METRICS).exists():
        return ""
    newest = max((directory / CHECKPOINTS).glob("step-*/manifest.json"), default=None)
    if newest is None:
        return f"it had no checkpoint yet: start again, in another --run-dir than {shortest(directory)}"
    return f"to resume from its checkpoint of step {int(newest.parent.name.removeprefix('step-'))}: {command}"
