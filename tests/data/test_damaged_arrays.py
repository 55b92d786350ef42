"""A damaged file of arrays is one error, however it is damaged; so is a damaged note of prepared data."""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.data import Arrays, Corpus, declared_fields, known_fields, prepare_arrays
from raypipe.errors import SpecError
from raypipe.job import DataSpec


def spec(path: Path) -> DataSpec:
    return DataSpec(type="arrays", path=str(path))


def whole(path: Path, compressed: bool = False) -> bytes:
    columns = {"pixels": np.arange(240, dtype=np.float32).reshape(60, 4), "labels": np.arange(60)}
    with path.open("wb") as out:
        (np.savez_compressed if compressed else np.savez)(out, **columns)  # type: ignore[arg-type]
    return path.read_bytes()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_archive(tmp_path: Path, kept: float, compressed: bool) -> None:
    path = tmp_path / "data.npz"
    content = whole(path, compressed)
    path.write_bytes(content[: int(kept * len(content))])
    for read in (declared_fields, lambda data: prepare_arrays(data, tmp_path / "data")):
        with pytest.raises(SpecError, match=r"data\.path: .*data\.npz holds no arrays: ."):
            read(spec(path))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
def test_any_bytes_changed_are_read_or_refused(changes, compressed: bool) -> None:
    with TemporaryDirectory() as name:
        path = Path(name) / "data.npz"
        content = bytearray(whole(path, compressed))
        for place, value in changes:
            content[place % len(content)] = value
        path.write_bytes(content)
        for read in (declared_fields, lambda data: prepare_arrays(data, Path(name) / "data")):
            with contextlib.suppress(SpecError):
                read(spec(path))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": np.zeros((0, 2)), "labels": np.zeros(0)}, "have no rows"),
        (
            {"x": np.arange(4), "x.offsets": np.array([0, 2, 4]), "x.fill": np.arange(2)},
            "x.fill is not one whole number",
        ),
        (
            {"x": np.arange(4), "x.offsets": np.array([0, 2, 4]), "x.fill": np.array(np.nan)},
            "x.fill is not one whole number",
        ),
    ],
)
def test_arrays_that_are_no_samples(tmp_path: Path, columns, words: str) -> None:
    np.savez(tmp_path / "data.npz", **columns)
    with pytest.raises(SpecError, match=words):
        declared_fields(spec(tmp_path / "data.npz"))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"fields": 3}', '{"fields": {"x": {"shape": 1}}}', "[" * 99_999]
)
def test_a_damaged_note_of_prepared_data(tmp_path: Path, content: str) -> None:
    for name, read in (("arrays.json", known_fields), ("arrays.json", Arrays.open), ("corpus.json", Corpus.open)):
        (tmp_path / name).write_text(content)
        with pytest.raises(SpecError, match="prepare the data again"):
            read(tmp_path)
