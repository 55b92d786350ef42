"""The store of compiled stages stays within its limit, and loses what has not been used for longest."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raypipe.runtime.compiled.stored.limit import keep_within, note_use

HOUR = 3600.0


def stored(store: Path, name: str, hours_ago: float, size: int = 100) -> Path:
    folder = store / name
    folder.mkdir()
    (folder / "stage.json").write_bytes(b"x" * size)
    (store / f"{name}.lock").touch()
    used = time.time() - hours_ago * HOUR
    os.utime(folder, (used, used))
    return folder


def test_what_is_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    old, older, new = stored(tmp_path, "old", 5), stored(tmp_path, "older", 9), stored(tmp_path, "new", 2)
    assert keep_within(tmp_path, limit_bytes=300) == []
    assert keep_within(tmp_path, limit_bytes=250) == [older]
    assert {path.name for path in tmp_path.iterdir()} == {"old", "old.lock", "new", "new.lock"}
    note_use(old)
    assert keep_within(tmp_path, limit_bytes=150) == [new]


def test_what_was_used_lately_stays_whatever_the_size(tmp_path: Path) -> None:
    lately = stored(tmp_path, "lately", 0.5, 1000)
    assert keep_within(tmp_path, limit_bytes=10) == []
    assert lately.is_dir()
