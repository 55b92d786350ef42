"""Where this installation is, for messages that tell people what to type."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

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
