"""The logs of a run, metrics.jsonl and events.jsonl, which can be read while it runs, and their events in words.

The driver writes them and the command line follows them, so that progress looks the same whether the driver runs on
this machine, in a Ray job or after a restart.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raypipe.files import open_regular, parse_json, strict_json, write_whole

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"


class RunLog:
    """Appends rows to a run directory's logs; readers can see each row at once.

    The logs are strict JSON, so numbers that are not finite become null. Nothing is kept open or buffered: a log may be
    replaced meanwhile (``rewind``, ``mend``), and what a full disk has refused is not written later, amid other rows.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in (METRICS, EVENTS):
            (directory / name).touch()

    def metric(self, row: dict[str, Any]) -> None:
        """Append a step (``step loss grad_norm lr step_s tokens_per_s bubble_ratio``) or validation (``val_loss``)."""
        _append(self._directory / METRICS, row)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event such as a start, a restart, a checkpoint, a prediction or an error, with the current time."""
        _append(self._directory / EVENTS, {"event": kind, "time": time.time(), **fields})


def log_event(directory: Path, kind: str, **fields: Any) -> None:
    """Append one event to a run's log (``RunLog.event``)."""
    RunLog(directory).event(kind, **fields)


def _append(path: Path, row: dict[str, Any]) -> None:
    """Append a row; a last line that a crash or a full disk cut short is terminated first, so that the row is intact.

    Raises:
        OSError: it could not be written whole.
    """
    line = strict_json(row).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def rewind(directory: Path, step: int) -> int:
    """Atomically remove damaged lines and the metrics of steps after ``step``, which will run again.

    Returns the number of these steps.

    The kept rows are usually the beginning of the file, which is then truncated in place, so that readers who have seen
    them continue after them. Only if a damaged line is among them, a new file is written.
    """
    path = directory / METRICS
    if not path.exists():
        return 0
    text = path.read_bytes()
    rows = [(line, row) for line in text.splitlines() if (row := row_of(line, METRICS)) is not None]
    lines = [line for line, row in rows if row["step"] <= step]
    kept = b"".join(line + b"\n" for line in lines)
    if text.startswith(kept):
        os.truncate(path, len(kept))
    else:
        write_whole(path, kept)
    return len({row["step"] for _, row in rows if row["step"] > step})


def mend(path: Path) -> tuple[int, ...]:
    """Remove damaged lines from a log and return their numbers, from 1; intact rows do not change.

    A copy of the old log is kept as ``NAME.damaged``, unless the only damage is a last line that was cut short.
    """
    if not path.exists():
        return ()
    content = path.read_bytes()
    lines = content.splitlines()
    wrong = tuple(n for n, line in enumerate(lines, 1) if line.strip() and row_of(line, path.name) is None)
    if wrong:
        if wrong != (len(lines),) or content.endswith(b"\n"):
            shutil.copy2(path, aside(path))
        removed = set(wrong)
        write_whole(path, b"".join(line + b"\n" for n, line in enumerate(lines, 1) if n not in removed))
    return wrong


def aside(path: Path) -> Path:
    """Return an unused name for a damaged file: ``NAME.damaged``, or with a number."""
    number, result = 1, path.with_name(f"{path.name}.damaged")
    while os.path.lexists(result):
        number += 1
        result = path.with_name(f"{path.name}.damaged-{number}")
    return result


def row_of(line: bytes, log: str) -> dict[str, Any] | None:
    """Parse a line of the log named ``log``; return None if it is damaged.

    A crash can cut the last line short, and a disk can lose bytes of any line. A metrics row must have the numbers that
    all readers rely on, an event its name.
    """
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    if log == METRICS:
        numbers = [row.get(key) for key in (("step", "val_loss") if "val_loss" in row else ("step",))]
        valid = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
    else:
        valid = log != EVENTS or isinstance(row.get("event"), str)
    return row if valid else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a log, without damaged lines."""
    return list(Follower(path).new_rows())


def events_since_start(directory: Path) -> list[dict[str, Any]]:
    """Return the events of a run since it was last started, or all where it never was."""
    events = read_rows(directory / EVENTS)
    return events[max((i for i, e in enumerate(events) if e["event"] == "run"), default=0) :]


def slow_devices(directory: Path) -> dict[int, float]:
    """Return the devices of a run that are slow now, and how many times as long as they should their tasks take."""
    slow: dict[int, float] = {}
    for event in events_since_start(directory):
        if event["event"] == "resized":
            slow = {int(device): float(factor) for device, factor in event.get("slow", {}).items()}
        elif event["event"] == "straggler":
            slow[event["device"]] = event["slowdown"]
    return {device: factor for device, factor in slow.items() if factor > 1.0}


class Follower:
    """Reads the rows that another process appends, each once; starts over if the file is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows appended since the last call."""
        try:
            with open_regular(self.path) as file:
                inode = os.fstat(file.fileno()).st_ino  # of the open file: the path may lead to another one by now
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                self._offset = min(self._offset, os.fstat(file.fileno()).st_size)  # truncated: all left was read before
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for line in data[:complete].splitlines():
            if (row := row_of(line, self.path.name)) is not None:
                yield row


def shape_words(plan: dict[str, Any]) -> str:
    """Return a plan's schedule, stages, replicas and micro-batches in words."""
    return (
        f"{plan['schedule']}, {plan['stages']} stages x {plan['replicas']} replicas, "
        f"micro-batches of {plan['microbatch']}"
    )


SENTENCES = {
    "serving": "serving {base} at {url}",
    "predicted": "predicted step {step_s:.4f} s, {bubble_ratio:.1%} idle",
    "replanned": "{at}replanned: {change}; predicted gain {gain:.1%} per step",
    "restored": "{at}change restored: steps without it are now {gain:.1%} slower",
    "drifted": "{at}step time drifted from {was_s:.4f} to {now_s:.4f} s: measuring again",
    "first_k": "{at}weight gradients of the first {k} layers of stage {stage} wait; memory allows {most}",
    "early_stop": "{at}stopped early: {message}",
    "paused": "{at}paused: {message}",
    "interrupted": "{at}ended by {message}",
    "devices_lost": "devices are lost: {message}",
    "undone": "{at}update undone and repeated with clipped gradients: their norm was {grad_norm:.4g}",
    "stuck": "{message}",
    "straggler": "{at}{message}",
    "uneven_experts": "{at}{message}",
    "failed": "failed: {message}",
    "error": "failed: {message}",
    "out_of_memory": "out of memory, so it goes on with {change}",
    "skipped": "{at}no update was made: {message}",
    "rewound": "{at}back to here from step {from_step}: {message}; {left_out} mini-batches are left out",
    "swapped": "{at}compiled stages run from here on",
    "notice": "note: {message}",
}
"""Events that one sentence with their fields tells; ``at`` is the step, where they have one."""


def event_sentences(row: dict[str, Any]) -> list[str]:
    """Return the sentences that tell an event of events.jsonl; none for events that only programs read.

    An event that lacks a field, as one of another version of raypipe may, is told by its name alone.

    >>> event_sentences({"event": "restarted", "checkpoint": None})
    ['restarting from the start']
    """
    try:
        return _sentences(row)
    except (KeyError, TypeError, ValueError):
        return [str(row.get("event"))]


def _sentences(row: dict[str, Any]) -> list[str]:
    kind = row["event"]
    at = f"step {row['step']:>5}  " if "step" in row else ""
    if kind in SENTENCES:
        return [SENTENCES[kind].format_map({**row, "at": at})]
    if kind == "started":
        lines = [f"{d['name']} on {d['device']}, {d['parameters']:,} parameters" for d in row["devices"]]
        return [*lines, f"resumed from step {row['resumed_from']}"] if row["resumed_from"] else lines
    if kind == "realised":
        back = ", so it is reverted" if row["gain"] < 0 else ""
        return [f"{at}the change gained {row['gain']:.1%} per step{back}"]
    if kind == "resized":
        how = ", as before" if row["devices"] == row["was"] else f" instead of {row['was']}"
        return [f"going on with {row['devices']} devices{how}: {shape_words(row['plan'])}"]
    if kind == "restarted":
        if row.get("source") == "neighbour":
            return [f"going on from copies of step {row['step']} in the nodes' memory"]
        return [f"restarting from {row['checkpoint'] or 'the start'}"]
    if kind == "recovered":
        count = row["steps_repeated"]
        repeated = f"{count} steps repeated" if count > 1 else "one step repeated" if count else "no step repeated"
        return [f"{at}replaced {', '.join(row['devices'])} in {row['seconds']:.1f} s, {repeated}: {row['message']}"]
    if kind == "compiling":
        return ["compiling stages beside the first steps" if row["beside"] else "compiling stages"]
    return _compiled(row) if kind == "compiled" else []


def _compiled(row: dict[str, Any]) -> list[str]:
    stage = f"stage {row['stage']}" + (f" of copy {row['replica']}" if row["replica"] else "")
    if row["reason"] is not None:
        return [f"note: {stage} runs eagerly: {row['reason']}"]
    said = f"compiled {stage} in {row['seconds']:.1f} s"
    if eager := row.get("eager_share", 0.0):
        said += f" for {row['lengths']} lengths of samples; {eager:.0%} of its micro-batches run eagerly"
    why = row.get("eager_validation")
    return [said, *([] if why is None else [f"note: {stage} validates eagerly: {why}"])]
