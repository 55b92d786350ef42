"""A new kind of task is a row of a table and a handler: nothing in the runner or the executor has to know of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from raypipe.runtime.executor.executor import HANDLERS
from raypipe.schedule.kinds import EXCHANGES, KINDS


def test_every_kind_has_a_handler() -> None:
    """Besides all-to-all as tasks of their own, which ``programs`` refuses: in a run they are inside F and B."""
    assert set(HANDLERS) == set(KINDS) - EXCHANGES


def test_a_kind_that_is_added_runs() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.runtime.executor.new_kind"],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.stdout.strip() == "ran", ended.stderr
