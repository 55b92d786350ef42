"""What people name is read where it is a regular file of a bounded size; all else is one OSError, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raypipe.files import expanded, is_url, read_regular


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert read_regular(file, 100) == b"x" * 100


def test_what_is_none_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large", tmp_path / "pipe"
    large.write_bytes(b"x" * 101)
    os.mkfifo(pipe)
    for path, words in (
        (large, "has 101 bytes; the limit is 100 bytes"),
        (pipe, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "nowhere", "No such file"),
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(OSError, match=words):
            read_regular(path, 100)


def test_schemes_and_home_directories() -> None:
    for name in ("s3://bucket/x", "gs://b", "hdfs:///x", "file:///tmp/x", Path("s3://bucket/x")):
        assert is_url(name)
    for name in ("runs/x", "/runs/x", "./s3:", "a b", "C:/x", ""):
        assert not is_url(name)
    assert expanded(Path("~no-such-user/x")) == Path("~no-such-user/x")
