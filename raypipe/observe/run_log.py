"""The files of a run that people and programs read while it goes on: metrics.jsonl and events.jsonl.

The driver writes them, the command line follows them; so progress looks the same whether the driver runs on this
machine, in a Ray job or after a restart.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from raypipe.atomic_write import write_whole
from raypipe.observe.strict_json import strict_json

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


class RunLog:
    """Appends rows to a run directory's logs; each row is on disk for readers at once.

    A number that is not finite is null there: the logs are strict JSON.
    """

    def __init__(self, directory: Path) -> None:
        self._metrics = _open_at_a_line(directory / METRICS)
        self._events = _open_at_a_line(directory / EVENTS)

    def metric(self, row: dict[str, Any]) -> None:
        """One step (``step loss grad_norm lr step_s tokens_per_s bubble_ratio``) or one validation (``val_loss``)."""
        self._metrics.write(strict_json(row) + "\n")

    def event(self, kind: str, **fields: Any) -> None:
        """Something worth telling once: a start, a restart, a checkpoint, a prediction, an error."""
        self._events.write(strict_json({"event": kind, "time": time.time(), **fields}) + "\n")

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()


def _open_at_a_line(path: Path) -> TextIO:
    """Open for appending; a last line that a crash cut short is ended first, so that it spoils no other."""
    file = path.open("a", encoding="utf-8", buffering=1)
    if path.stat().st_size:
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read() != b"\n":
                file.write("\n")
    return file


def rewind(directory: Path, step: int) -> None:
    """Forget metrics of steps after ``step``, which will be run again, and lines that are damaged. Atomic.

    What is kept is usually the beginning of the file, so the file is cut short in place: its readers have seen the
    kept rows and go on behind them. Only a damaged line among those makes it a new file.
    """
    path = directory / METRICS
    if not path.exists():
        return
    text = path.read_bytes()
    rows = ((line, row_of(line, METRICS)) for line in text.splitlines())
    lines = [line for line, row in rows if row is not None and row["step"] <= step]
    kept = b"".join(line + b"\n" for line in lines)
    if text.startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_whole(path, kept)


def mend(path: Path) -> tuple[int, ...]:
    """Take damaged lines out of a log; returns their numbers, from 1. The rows that are whole stay as they are.

    The log as it was stays beside it, as ``NAME.damaged``, unless all that is wrong is the last line, cut short.
    """
    if not path.exists():
        return ()
    content = path.read_bytes()
    lines = content.splitlines()
    wrong = tuple(n for n, line in enumerate(lines, 1) if line.strip() and row_of(line, path.name) is None)
    if wrong:
        if wrong != (len(lines),) or content.endswith(b"\n"):
            shutil.copy2(path, aside(path))
        left_out = set(wrong)
        write_whole(path, b"".join(line + b"\n" for n, line in enumerate(lines, 1) if n not in left_out))
    return wrong


def aside(path: Path) -> Path:
    """A name for a damaged file that no other has: ``NAME.damaged``, or numbered."""
    number, found = 1, path.with_name(f"{path.name}.damaged")
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}.damaged-{number}")
    return found


def row_of(line: bytes, log: str) -> dict[str, Any] | None:
    """The row in a line of a log of this name; None where the line is damaged.

    A crash cuts the last line short, and a disk may lose bytes of any. Of metrics the numbers are there that every
    reader takes for granted; an event has its name.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    if log == METRICS:
        numbers = [row.get(key) for key in (("step", "val_loss") if "val_loss" in row else ("step",))]
        whole = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
    else:
        whole = log != EVENTS or isinstance(row.get("event"), str)
    return row if whole else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a log; lines that are damaged or cut short are left out."""
    return list(Follower(path).new_rows())


class Follower:
    """Reads the rows another process appends, each once; starts over when the file is another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        """Rows that came since the last call."""
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino  # not the path's: it may lead to another file by now
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                self._offset = min(self._offset, os.fstat(file.fileno()).st_size)  # rewound: the rest has been read
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for line in data[:complete].splitlines():
            if (row := row_of(line, self.path.name)) is not None:
                yield row
