"""A file or folder that is written at once: whole or not at all, and nothing else is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.atomic_write import whole, write_whole


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
