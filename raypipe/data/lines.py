"""Text whose samples are lines, or the records of JSON lines, each of its own length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raypipe.data.arrays import Arrays, split_rows, write_arrays
from raypipe.data.given_files import check_object, read_text
from raypipe.data.ragged import Ragged
from raypipe.data.text_files import TextFile, find_text
from raypipe.errors import SpecError
from raypipe.job import DataSpec

META = "lines.json"
LINE = "line"
"""Name of the only field: the bytes of a line."""


def prepare_lines(data: DataSpec, longest: int, directory: Path) -> Arrays:
    """Find the job's text and write its lines, except blank ones, into ``directory``; a tenth of them is held out.

    Raises:
        SpecError: there is no text, a line has more than ``longest`` bytes, or a record is not valid.
    """
    found: list[bytes] = []
    too_long: list[tuple[str, int]] = []
    for file in find_text(data.path, raw=False).files:
        for place, line in _lines(file):
            if len(line) > longest:
                too_long.append((place, len(line)))
            found.append(line)
    if too_long:
        place, length = max(too_long, key=lambda one: one[1])
        why = f"{len(too_long)} of {len(found)} lines take more than {longest} bytes; {place} takes {length}"
        raise SpecError("data.path", why, f"raise model.sequence to {length}, or break them up")
    rows = [np.frombuffer(line, dtype=np.uint8) for line in found]
    if len(rows) < 2:
        raise SpecError("data.path", f'"{data.path}" holds {len(rows)} lines', "give text with more of them")
    return write_arrays(split_rows({LINE: Ragged.of(rows)}), directory, data.path, META)


def _lines(file: TextFile) -> Iterator[tuple[str, bytes]]:
    """Yield (place, bytes) of each line that is not blank."""
    for number, line in enumerate(read_text(file.path).splitlines(), 1):
        if line.strip():
            where = f"{file.name}, line {number}"
            yield where, _text(line, where) if file.format == "jsonl" else line


def _text(record: bytes, where: str) -> bytes:
    """Return the text of one record.

    Raises:
        SpecError: it is not a JSON object with a text, or its text is empty or holds a NUL byte.
    """
    try:
        found = check_object(record)
        text = found["text"].encode()  # type: ignore[attr-defined]
    except ValueError as error:
        raise SpecError("data.path", f"{where}: {error}", 'give one {"text": "..."} a line') from None
    except (KeyError, AttributeError):
        holds = f"text is {found['text']!r:.20}" if "text" in found else f"has {', '.join(found) or 'nothing'}"
        why = f"{where}: not a JSON object with a text: {holds}"
        raise SpecError("data.path", why, 'give one {"text": "..."} a line') from None
    if not text or b"\0" in text:
        why = "is empty" if not text else "holds a NUL byte"
        raise SpecError("data.path", f"{where}: its text {why}", "leave it out")
    return bytes(text)
