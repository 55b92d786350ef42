"""Text as training data: find its files, and pack them into arrays of bytes or take their lines.

The split of packed text is by file, so that no window of a held-out file is trained on. It depends on file names alone:
neither the seed nor (in all but small corpora) other files change the split of a file.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.arrays import Arrays, split_rows, write_arrays
from raypipe.data.given_files import Format, check_content, check_object, find_files, kind_of, looks_like, read_text
from raypipe.data.ragged import Ragged
from raypipe.data.sample_order import SPLITS, Split, order_key, permuted
from raypipe.errors import SpecError
from raypipe.files import expanded, read_json, sha256, whole, write_whole
from raypipe.job import DataSpec

STDLIB = "stdlib"
"""The ``data.path`` that stands for the sources of Python's standard library."""
# Without installed packages, which are not part of it, and without tests and generated tables, which are bulky.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of text, with the name that decides its position and its split."""

    name: str
    """Path relative to the corpus's root, with forward slashes: the same on every machine."""
    path: Path
    format: Format | None
    """By its name."""
    bytes: int
    """Of its text: uncompressed, without a byte order mark."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text files of a corpus, sorted by name, and how many files were skipped."""

    files: tuple[TextFile, ...]
    binary: int
    """Files that hold a NUL byte."""
    empty: int


def find_text(source: str, raw: bool = True) -> TextFiles:
    """Find the text files that ``stdlib``, a file, a folder (recursively, without hidden ones) or a glob names.

    A file is text if it holds no NUL byte, once it is uncompressed as its name says. Without ``raw``, JSON in a
    file that is not named so is an error.

    Raises:
        SpecError: there are no files, none of them is text, one cannot be read, or one that is named as text is not.
    """
    if source == STDLIB:
        result = find_files(sysconfig.get_paths()["stdlib"], _NOT_LIBRARY)
        result = [file for file in result if file.path.suffix == ".py"]
    else:
        result = find_files(source)
    texts: list[TextFile] = []
    empty = 0
    binary: list[str | None] = []
    for file in result:
        format = kind_of(file.path).format
        if format in ("parquet", "arrow"):
            binary.append("Parquet")
            continue
        check_content(file.path, raw=raw)
        content = read_text(file.path)
        if not content:
            empty += 1
        elif b"\0" in content and format == "jsonl":
            raise SpecError(
                "data.path", f"{file.path} holds a NUL byte, which JSON does not", "mend it, or leave it out"
            )
        elif b"\0" in content:
            binary.append(looks_like(content))
        else:
            texts.append(TextFile(file.name, file.path, format, len(content)))
    if not texts:
        raise _no_text(source, binary, empty)
    return TextFiles(tuple(texts), len(binary), empty)


def _no_text(source: str, binary: list[str | None], empty: int) -> SpecError:
    if not binary and not empty and not expanded(Path(source)).exists():
        why = f'no file matches "{source}"' if glob.has_magic(source) else f'"{source}" does not exist'
        fix = "give a file, folder or glob (** goes into sub-folders) of text, or stdlib"
        return SpecError("data.path", why, fix)
    left_out = f"{len(binary)} binary and {empty} empty files" if binary or empty else "no files"
    tables = "Parquet" in binary or "Arrow" in binary
    fix = "data.type: documents reads Parquet and Arrow" if tables else "give a file, folder or glob of text"
    return SpecError("data.path", f'"{source}" holds no text: {left_out}', fix)


HELD_OUT = 16
"""A file is held out if the first byte of its name's hash is below this: 1/16 of the files."""
END = b"\0"
"""Byte that follows every file's text. No text contains it, so a model learns where files begin and end."""
TAIL = 10
"""In a corpus of one file, the last 1/10 of it is held out."""


def prepare(data: DataSpec, sequence: int, directory: Path) -> Corpus:
    """Find the job's text, split it and write ``train.npy``, ``val.npy`` and ``corpus.json`` into ``directory``.

    ``sequence`` is the number of tokens of a sample. Each file is replaced atomically, ``corpus.json`` last, so a
    reader never sees an incomplete corpus.

    Raises:
        SpecError: there is no text, or less than one sample in either split.
    """
    result = find_text(data.path)
    directory.mkdir(parents=True, exist_ok=True)
    parts = _split(result, sequence)
    lengths = [_write(directory / f"{name}.npy", parts[name]) for name in SPLITS]
    for name, length in zip(SPLITS, lengths, strict=True):
        if length <= sequence:
            raise SpecError(
                "data.path",
                f'"{data.path}" is too short: {length} bytes for the {name} split, but one sample takes {sequence + 1}',
                "give more text, or lower model.sequence",
            )
    meta = {
        "source": data.path,
        "sequence": sequence,
        "vocabulary": 256,
        "bytes": dict(zip(SPLITS, lengths, strict=True)),
        "files": {name: len(parts[name]) for name in SPLITS},
        "skipped": {"binary": result.binary, "empty": result.empty},
        "sha256": {name: sha256(directory / f"{name}.npy") for name in SPLITS},
    }
    write_whole(directory / META, json.dumps(meta, indent=1).encode(), synced=True)
    return Corpus.open(directory)


Piece = tuple[TextFile, int, int]
"""A file, and the range of its bytes that is used."""


def _split(found: TextFiles, sequence: int) -> dict[str, list[Piece]]:
    """Divide the files into the pieces of each split."""
    if len(found.files) == 1:
        file = found.files[0]
        cut = file.bytes - max(file.bytes // TAIL, min(sequence, file.bytes))
        return {"train": [(file, 0, cut)], "val": [(file, cut, file.bytes)]}
    hashes = {file.name: hashlib.sha256(file.name.encode()).digest() for file in found.files}
    order = sorted(found.files, key=lambda file: hashes[file.name])
    held_out: set[str] = set()
    held_out_bytes = 0
    for file in order[:-1]:  # at least one file remains for training
        # In a small corpus chance may hold out nothing, so files are taken in hash order until there is one sample.
        if hashes[file.name][0] < HELD_OUT or held_out_bytes <= sequence:
            held_out.add(file.name)
            held_out_bytes += file.bytes + len(END)
    files = [(file, 0, file.bytes) for file in found.files]
    return {
        "train": [piece for piece in files if piece[0].name not in held_out],
        "val": [piece for piece in files if piece[0].name in held_out],
    }


def _write(path: Path, pieces: Sequence[Piece]) -> int:
    """Write the pieces, each followed by ``END``, as one uint8 array, file by file; return its length."""
    length = sum(stop - start + len(END) for _, start, stop in pieces)
    header = {"descr": "|u1", "fortran_order": False, "shape": (length,)}
    with whole(path) as partial, partial.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for file, start, stop in pieces:
            content = read_text(file.path)
            if len(content) != file.bytes:
                raise SpecError("data.path", f"{file.path} changed while it was read", "start again")
            out.write(content[start:stop] + END)
    return length


LINES_META = "lines.json"
LINE = "line"
"""Name of the only field: the bytes of a line."""


def prepare_lines(data: DataSpec, longest: int, directory: Path) -> Arrays:
    """Find the job's text and write its lines, except blank ones, into ``directory``; a tenth of them is held out.

    Raises:
        SpecError: there is no text, a line has more than ``longest`` bytes, or a record is not valid.
    """
    result: list[bytes] = []
    too_long: list[tuple[str, int]] = []
    for file in find_text(data.path, raw=False).files:
        for place, line in _lines(file):
            if len(line) > longest:
                too_long.append((place, len(line)))
            result.append(line)
    if too_long:
        place, length = max(too_long, key=lambda one: one[1])
        why = f"{len(too_long)} of {len(result)} lines take more than {longest} bytes; {place} takes {length}"
        raise SpecError("data.path", why, f"raise model.sequence to {length}, or break them up")
    rows = [np.frombuffer(line, dtype=np.uint8) for line in result]
    if len(rows) < 2:
        raise SpecError("data.path", f'"{data.path}" holds {len(rows)} lines', "give text with more of them")
    return write_arrays(split_rows({LINE: Ragged.of(rows)}), directory, data.path, LINES_META)


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
        result = check_object(record)
        text = result["text"].encode()  # type: ignore[attr-defined]
    except ValueError as error:
        raise SpecError("data.path", f"{where}: {error}", 'give one {"text": "..."} a line') from None
    except (KeyError, AttributeError):
        holds = f"text is {result['text']!r:.20}" if "text" in result else f"has {', '.join(result) or 'nothing'}"
        why = f"{where}: not a JSON object with a text: {holds}"
        raise SpecError("data.path", why, 'give one {"text": "..."} a line') from None
    if not text or b"\0" in text:
        why = "is empty" if not text else "holds a NUL byte"
        raise SpecError("data.path", f"{where}: its text {why}", "leave it out")
    return bytes(text)


META = "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """Two arrays of bytes, and the rule that cuts samples from them.

    A split of N bytes holds ``(N - 1) // sequence`` adjacent windows; a sample is one window and, as targets, the same
    shifted by one. Sample k of step t is number ``t * batch + k`` in a sequence of epochs, each of which visits all
    windows in an order that depends only on (seed, epoch).
    """

    meta: dict[str, Any]
    """The facts that ``prepare`` wrote: source, sequence, bytes and files per split, files skipped, digests."""
    arrays: dict[Split, npt.NDArray[np.uint8]]
    sequence: int
    """Number of tokens of a sample."""

    @staticmethod
    def open(directory: Path) -> Corpus:
        """Map the corpus that ``prepare`` wrote.

        Raises:
            SpecError: it is missing or damaged.
        """
        try:
            meta = read_json(directory / META)
            arrays: dict[Split, npt.NDArray[np.uint8]] = {
                # A plain view of the map, because slicing numpy's memmap class takes some microseconds longer.
                split: np.asarray(np.load(directory / f"{split}.npy", mmap_mode="r"))
                for split in SPLITS
            }
            return Corpus(meta, arrays, int(meta["sequence"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
            fix = "prepare the data again: remove the folder, then --resume does"
            raise SpecError(str(directory), f"holds no packed corpus: {error}", fix) from None

    def windows(self, split: Split) -> int:
        """Return the number of samples of one epoch."""
        return (len(self.arrays[split]) - 1) // self.sequence

    def samples(self, split: Split, seed: int, step: int, first: int, count: int, batch: int) -> tuple[Tensor, Tensor]:
        """Read samples ``first`` to ``first + count - 1`` of a step's mini-batch of ``batch``.

        Returns tokens and targets, each int64 ``[count, sequence]``.
        """
        rows = self.rows(split, seed, step, first, count, batch)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def rows(self, split: Split, seed: int, step: int, first: int, count: int, batch: int) -> Tensor:
        """Read the same samples as int64 ``[count, sequence + 1]``, tokens and targets overlapping.

        Held-out samples do not depend on the seed, so that the validation losses of all runs can be compared.
        """
        rows = np.empty((count, self.sequence + 1), dtype=np.int64)
        array, sequence, windows = self.arrays[split], self.sequence, self.windows(split)
        for row in range(count):
            epoch, position = divmod(step * batch + first + row, windows)
            start = permuted(order_key(split, seed if split == "train" else 0, epoch), windows, position) * sequence
            rows[row] = array[start : start + sequence + 1]
        return torch.from_numpy(rows)

    def batch(self, split: Split, seed: int, step: int, batch: int) -> tuple[Tensor, Tensor]:
        """Read the whole mini-batch of a step: tokens and targets, each int64 ``[batch, sequence]``."""
        return self.samples(split, seed, step, 0, batch, batch)
