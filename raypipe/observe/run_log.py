"""The files of a run that people and programs read while it goes on: metrics.jsonl and events.jsonl.

The driver writes them, the command line follows them; so progress looks the same whether the driver runs on this
machine, in a Ray job or after a restart.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


class RunLog:
    """Appends rows to a run directory's logs; each row is on disk for readers at once."""

    def __init__(self, directory: Path) -> None:
        self._metrics = _open_at_a_line(directory / METRICS)
        self._events = _open_at_a_line(directory / EVENTS)

    def metric(self, row: dict[str, Any]) -> None:
        """One step (``step loss grad_norm lr step_s tokens_per_s bubble_ratio``) or one validation (``val_loss``)."""
        self._metrics.write(json.dumps(row) + "\n")

    def event(self, kind: str, **fields: Any) -> None:
        """Something worth telling once: a start, a restart, a checkpoint, a prediction, an error."""
        self._events.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")

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
    """Forget metrics of steps after ``step``: they will be run again. Atomic."""
    path = directory / METRICS
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    replacement = path.with_suffix(".tmp")
    replacement.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    replacement.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # a line cut short by a crash


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a log; what a crash cut short is left out."""
    return list(Follower(path).new_rows())


class Follower:
    """Reads the rows another process appends, each once; starts over when the file was rewound."""

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
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for line in data[:complete].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut short by a crash
            yield row
