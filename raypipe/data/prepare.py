"""Pack the text of a job into two arrays of bytes, training and held-out, once per run.

The split is by file, so that no window of a held-out file is trained on. It depends on file names alone: neither the
seed nor (in all but small corpora) other files change the split of a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raypipe.atomic_write import whole, write_whole
from raypipe.data.corpus import META, SPLITS, Corpus
from raypipe.data.given_files import read_text
from raypipe.data.text_files import Found, TextFile, find_text
from raypipe.errors import SpecError
from raypipe.files import sha256
from raypipe.job import DataSpec

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
    found = find_text(data.path)
    directory.mkdir(parents=True, exist_ok=True)
    parts = _split(found, sequence)
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
        "skipped": {"binary": found.binary, "empty": found.empty},
        "sha256": {name: sha256(directory / f"{name}.npy") for name in SPLITS},
    }
    write_whole(directory / META, json.dumps(meta, indent=1).encode(), synced=True)
    return Corpus.open(directory)


Piece = tuple[TextFile, int, int]
"""A file, and the range of its bytes that is used."""


def _split(found: Found, sequence: int) -> dict[str, list[Piece]]:
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
