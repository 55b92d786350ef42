"""Pack the text of a job into two arrays of bytes, training and held-out, once per run.

The split is by file, so that no window of a held-out file is ever trained on, and follows from file names alone:
neither the seed nor other files move a file from one side to the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raypipe.atomic_write import whole, write_whole
from raypipe.data.corpus import META, SPLITS, Corpus
from raypipe.data.text_files import Found, TextFile, find_text
from raypipe.errors import SpecError
from raypipe.files import sha256
from raypipe.job import DataSpec

HELD_OUT = 16
"""Of 256 values of a name's hash, those that hold a file out: 1/16 of the files."""
END = b"\0"
"""Follows every file's text; no text holds it, so a model learns where a file begins and ends."""
TAIL = 10
"""A corpus of one file holds out its last tenth."""


def prepare(data: DataSpec, sequence: int, directory: Path) -> Corpus:
    """Find the job's text, split it and write ``train.npy``, ``val.npy`` and ``corpus.json`` into ``directory``.

    ``sequence`` is the tokens of a sample. Each file is replaced in one move, ``corpus.json`` last, so a reader never
    sees half a corpus. Raises SpecError where there is no text, or less than one sample on either side.
    """
    found = find_text(data.path)
    directory.mkdir(parents=True, exist_ok=True)
    parts = _split(found, sequence)
    lengths = [_write(directory / f"{name}.npy", parts[name]) for name in SPLITS]
    for name, length in zip(SPLITS, lengths, strict=True):
        if length <= sequence:
            raise SpecError(
                "data.path",
                f'"{data.path}" is too short: {length} bytes for the {name} split, one sample takes {sequence + 1}',
                "give more text, or lower model.sequence",
            )
    meta = {
        "source": data.path,
        "sequence": sequence,
        "vocabulary": 256,
        "bytes": dict(zip(SPLITS, lengths, strict=True)),
        "files": {name: len(parts[name]) for name in SPLITS},
        "skipped": {"binary": found.binary, "empty": found.empty},
        "sha256": {name: sha256(directory / f"{name}.npy") for name in SPLITS},
    }
    write_whole(directory / META, json.dumps(meta, indent=1).encode(), synced=True)
    return Corpus.open(directory)


Piece = tuple[TextFile, int, int]
"""A file, and the range of its bytes that counts."""


def _split(found: Found, sequence: int) -> dict[str, list[Piece]]:
    """The pieces of each split."""
    if len(found.files) == 1:
        file = found.files[0]
        cut = file.bytes - max(file.bytes // TAIL, min(sequence, file.bytes))
        return {"train": [(file, 0, cut)], "val": [(file, cut, file.bytes)]}
    hashes = {file.name: hashlib.sha256(file.name.encode()).digest() for file in found.files}
    order = sorted(found.files, key=lambda file: hashes[file.name])
    held_out: set[str] = set()
    held = 0
    for file in order[:-1]:  # something is left to train on
        # In a small corpus chance may hold out nothing: take files in hash order until there is one sample.
        if hashes[file.name][0] < HELD_OUT or held <= sequence:
            held_out.add(file.name)
            held += file.bytes + len(END)
    whole = [(file, 0, file.bytes) for file in found.files]
    return {
        "train": [piece for piece in whole if piece[0].name not in held_out],
        "val": [piece for piece in whole if piece[0].name in held_out],
    }


def _write(path: Path, pieces: Sequence[Piece]) -> int:
    """Write the pieces, each followed by ``END``, as one uint8 array, a file at a time; returns its length."""
    length = sum(stop - start + len(END) for _, start, stop in pieces)
    header = {"descr": "|u1", "fortran_order": False, "shape": (length,)}
    with whole(path) as partial, partial.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, header)
        for file, start, stop in pieces:
            content = file.path.read_bytes()
            if len(content) != file.bytes:
                raise SpecError("data.path", f"{file.path} changed while it was read", "start again")
            out.write(content[start:stop] + END)
    return length
