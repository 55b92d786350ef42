"""Kernels compiled ahead, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from raypipe.machine_code import compile_ahead, compiling, is_kept, wait_for_ahead

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
    assert compiling()
    wait_for_ahead(said.append)
    assert not compiling()
    assert (tmp_path / MARK).exists()
    assert said == ["compiling the planner, once on this machine"]
    wait_for_ahead(said.append)
    assert len(said) == 1


def test_one_that_fails_is_left_to_this_process() -> None:
    wait_for_ahead(lambda _: None)
    compile_ahead(fail)
    wait_for_ahead(lambda _: None)


def test_code_is_known_to_be_kept_once_it_was_compiled(tmp_path: Path, monkeypatch) -> None:
    lines = ("from raypipe.machine_code import compiled", "@compiled", "def twice(n: int) -> int:", "    return 2 * n")
    (tmp_path / "kept_kernel.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    from kept_kernel import twice

    assert not is_kept(twice)
    assert twice(3) == 6
    assert is_kept(twice)
