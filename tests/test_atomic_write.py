"""A file or folder that is written at once: whole or not at all, and nothing else is left."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raypipe.cli._shared.options import write
from raypipe.errors import RaypipeError
from raypipe.files import whole, write_whole
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.observe.figures import gantt, save
from raypipe.observe.timelines import save_timelines, write_trace
from raypipe.plan.plan import Plan
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Timeline

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("synced", [False, True])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, synced: bool) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    write_whole(file, b"after", synced=synced)
    assert file.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [file]


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")

    def fails() -> None:
        with whole(file) as partial:
            partial.write_bytes(b"half")
            assert file.read_bytes() == b"before"
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        fails()
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_takes_the_place_of_an_empty_one_only(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with whole(folder, folder=True) as partial:
        (partial / "a").touch()
        assert not any(folder.iterdir())
    assert [p.name for p in folder.iterdir()] == ["a"]
    with pytest.raises(OSError, match="not empty"), whole(folder, folder=True) as partial:
        (partial / "b").touch()
    assert [p.name for p in folder.iterdir()] == ["a"]
    assert list(tmp_path.iterdir()) == [folder]


def test_two_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with whole(file) as first, whole(file) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert file.read_bytes() == b"first"  # whose block ended last
    assert list(tmp_path.iterdir()) == [file]


def test_others_may_read_as_the_umask_says(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"")
    (tmp_path / "plain").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    script = f"""
import os, signal, pathlib
from raypipe.files import write_whole

def half(path, data):
    with path.open("wb") as out:
        out.write(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

pathlib.Path.write_bytes = half
write_whole(pathlib.Path({str(file)!r}), b"after" * 1000)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 2, "the half that was written is gone, or was never there"


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"before")
    link.symlink_to(file)
    write_whole(link, "after, in µs")
    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "after, in µs"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def step() -> Timeline:
    return simulate(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2))


PARALLEL = ParallelSpec(schedule="1f1b", stages=2, microbatch=1)
WRITERS: dict[str, Callable[[Path], object]] = {
    "plan.json": lambda path: Plan.of(PARALLEL, ((0,), (1,)), 2).save(path),
    "timeline.json": lambda path: save_timelines(path.parent, step(), None),
    "trace.json": lambda path: write_trace(step(), path),
    "figure.svg": lambda path: save(gantt([step()]), path),
    "verb.json": lambda path: write(path, "{}"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / name
    WRITERS[name](file)
    before = file.read_bytes()
    assert before

    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as out:
            out.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((OSError, RaypipeError), match="No space left"):
        WRITERS[name](file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


IN_PLACE = {"files.py": 1, "runtime/hosts/host_check.py": 1}
"""Calls that write in place: to a pipe or a terminal, and a token that exists to be looked for."""


@pytest.mark.slow
def test_nothing_else_writes_a_file_in_place() -> None:
    """In a ``whole`` block the file that is written is called ``partial``; logs are appended to."""
    result: dict[str, int] = {}
    for path in sorted((ROOT / "raypipe").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            modes = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
            writes = name in ("write_text", "write_bytes") or (name == "open" and {"w", "wb", "x", "xb"} & {*modes})
            if writes and owner != "partial":
                where = str(path.relative_to(ROOT / "raypipe"))
                result[where] = result.get(where, 0) + 1
    assert result == IN_PLACE
