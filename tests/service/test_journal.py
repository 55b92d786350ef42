"""A journal gives back what was written, without what a killed process had begun to write."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from raypipe.errors import RunError, SpecError
from raypipe.runtime.session.slots import Adapters
from raypipe.service import run_files
from raypipe.service.futures import Answer
from raypipe.service.run_files import EACH, Journal

NAME = "s:train:3"


def opened(directory: Path, begun: bool = True) -> Journal:
    run_files.begin_session(directory, "s")
    made = Journal.of(directory, NAME, 2, Adapters(4, "mlp", 7))
    if begun:
        made.add(0, "create_model", b"{}")
    return made


def test_what_was_written_comes_back_in_order(tmp_path: Path) -> None:
    made, answers = (
        opened(tmp_path),
        (Answer({"a": 1}), Answer(protobuf=b"\n\0"), SpecError("x", "y", "z"), RunError("", "w")),
    )
    for number in (2, 1, 3):
        made.add(number, "optim_step", bytes([10, 0, number]))
    for number, answer in enumerate(answers):
        made.add_answer(number, f"digest {number}", answer)
    (found,) = run_files.models(tmp_path, "s")
    assert (found.name, found.slot, found.adapters) == (NAME, 2, Adapters(4, "mlp", 7))
    assert [one.number for one in found.requests()] == [0, 1, 2, 3]
    assert found.requests(2) == [(3, "optim_step", b"\n\0\3")]
    back = found.answers(2)
    assert {at: digest for at, (digest, _) in back.items()} == {n: f"digest {n}" for n in range(3)}
    assert [back[0][1], back[1][1], str(back[2][1])] == [answers[0], answers[1], str(answers[2])]


@pytest.mark.parametrize("cut", [1, 4, 30])
def test_a_part_of_a_request_is_none(tmp_path: Path, cut: int) -> None:
    """The process was killed as it wrote request 2; another goes on, and is killed too."""
    made = opened(tmp_path)
    made.add(1, "optim_step", b"first")
    made.add(2, "optim_step", b"second")
    newest = made.folder / "00000001"
    newest.write_bytes(newest.read_bytes()[:-cut])
    for number in (2, 3):
        (found,) = run_files.models(tmp_path, "s")
        assert [one.number for one in found.requests()] == list(range(number))
        found.add(number, "optim_step", b"again")
    (found,) = run_files.models(tmp_path, "s")
    assert found.requests()[2:] == [(2, "optim_step", b"again"), (3, "optim_step", b"again")]


def test_a_model_that_was_not_begun_is_removed(tmp_path: Path) -> None:
    made = opened(tmp_path, begun=False)
    made.folder.mkdir()
    (made.folder / "00000000").write_bytes(b'{"number": 0')
    assert list(run_files.models(tmp_path, "s")) == []
    assert not made.folder.exists()


def test_files_go_when_a_snapshot_has_their_requests(tmp_path: Path) -> None:
    made = opened(tmp_path)
    for number in range(1, 3 * EACH):
        made.add(number, "optim_step", b"")
    made.drop(2 * EACH - 1)
    assert [one.number for one in made.requests()] == [0, *range(EACH + 1, 3 * EACH)]
    made.drop(3 * EACH)  # the newest file stays
    assert [one.number for one in made.requests()] == [0, *range(2 * EACH + 1, 3 * EACH)]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.add(1, "optim_step", b"first")
    most, before = (made.folder / "00000001").stat().st_size + 20, resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(OSError, match=r".*"):
            made.add(2, "optim_step", b"second")
        made.add_answer(1, "digest", Answer({}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handled)
    assert isinstance(made.lost, OSError)
    made.add(2, "optim_step", b"second")
    assert [one.body for one in made.requests()] == [b"{}", b"first", b"second"]
