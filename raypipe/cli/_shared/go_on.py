"""How to go on with a run that ended before its last step: the command, and from where."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from raypipe.errors import python, shortest
from raypipe.observe.run_dir import CHECKPOINTS, stillborn
from raypipe.observe.run_log import METRICS


def program() -> str:
    """What runs this program's commands: ``raypipe``, if the shell finds it; else this interpreter's module.

    >>> program() in ("raypipe", f"{python()} -m raypipe")
    True
    """
    return "raypipe" if shutil.which("raypipe") else f"{python()} -m raypipe"


def resume_command(job: Path, directory: Path, overrides: Sequence[str], plan: Path | None) -> str:
    """The command line that goes on with the run in a directory, as the one that started it was given."""
    words = ["train", str(job), *(word for text in overrides for word in ("--set", text))]
    words += ["--plan", str(plan)] if plan is not None else []
    return f"{program()} {shlex.join([*words, '--run-dir', shortest(directory)])} --resume"


def advice(directory: Path, command: str) -> str:
    """What to do about a run that was interrupted or failed; "" where it left nothing to go on from."""
    if stillborn(directory) or not (directory / METRICS).exists():
        return ""
    newest = max((directory / CHECKPOINTS).glob("step-*/manifest.json"), default=None)
    if newest is None:
        return f"it had no checkpoint yet: start again, in another --run-dir than {shortest(directory)}"
    return f"to go on from its checkpoint of step {int(newest.parent.name.removeprefix('step-'))}: {command}"
