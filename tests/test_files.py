"""What people name is read where it is a regular file of a bounded size; all else is one OSError, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raypipe.files import expanded, is_url, parse_json, read_json, read_regular


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', 'the key "c" is given twice'),
        ('{"a": NaN}', "NaN is not a number in JSON"),
        ("[-Infinity]", "-Infinity is not a number in JSON"),
        ("[" * 200_000, "nested too deeply"),
        ("1" * 5000, "digits"),
        (b"\xff\xfe", "decode"),
        ("", "Expecting value"),
        ('["\\ud800"]', "surrogates not allowed"),
    ],
)
def test_json_that_is_not_exact_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_json_of_a_file_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(tmp_path / "x.json")
