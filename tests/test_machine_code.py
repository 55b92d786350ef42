"""Kernels compiled ahead, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from raypipe.machine_code import compile_ahead, wait_for_ahead

MARK = "made"


def leave_a_mark() -> None:
    """Stand for the loading of kernels."""
    Path(MARK).touch()


def fail() -> None:
    """Stand for a compiler that is broken."""
    raise OSError("no compiler")


def test_it_runs_once_beside_and_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    wait_for_ahead(lambda _: None)  # other tests of this process may have begun
    compile_ahead(leave_a_mark)
    compile_ahead(fail)  # one is enough
    wait_for_ahead(said.append)
    assert (tmp_path / MARK).exists()
    assert said == ["compiling the planner, once on this machine"]
    wait_for_ahead(said.append)
    assert len(said) == 1


def test_one_that_fails_is_left_to_this_process() -> None:
    wait_for_ahead(lambda _: None)
    compile_ahead(fail)
    wait_for_ahead(lambda _: None)
