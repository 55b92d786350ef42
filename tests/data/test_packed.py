"""Which rows hold several documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from raypipe.data import declared_fields, known_fields, prepare_arrays
from raypipe.data.ragged import Column, Ragged, columns_of, is_packed
from raypipe.errors import SpecError
from raypipe.job import DataSpec


def columns(positions: list[list[int]], mask: list[list[int]] | None = None) -> dict[str, Column]:
    made: dict[str, Column] = {}
    for name, rows in (("position_ids", positions), ("attention_mask", mask)):
        if rows is not None:
            arrays = [np.array(row) for row in rows]
            made[name] = Ragged.of(arrays) if len({len(row) for row in rows}) > 1 else np.stack(arrays)
    return made


@pytest.mark.parametrize(
    ("positions", "mask", "expected"),
    [
        ([[0, 1, 2], [0, 1, 2]], None, False),
        ([[2, 3, 4], [2, 3]], None, False),  # as RoBERTa counts; the row after begins anew
        ([[0, 1, 2], [0, 1, 0]], None, True),
        ([[0, 1, 2, 3], [0, 0, 1]], None, True),
        ([[0, 1, 5]], None, True),  # as transformers has it
        ([[0, 1, 5]], [[1, 1, 1]], False),
        ([[0, 1, 0]], [[1, 1, 1]], True),
        ([[1, 1, 0, 1]], [[0, 0, 1, 1]], False),  # padded on the left
        ([[0, 1, 0, 0]], [[1, 1, 0, 0]], False),  # padded on the right
        ([[0, 1, 0, 1, 2]], [[0, 0, 1, 1, 1]], False),
        ([[0, 1, 0, 1, 0]], [[1, 1, 1, 1, 0]], True),
        ([[0, 0, 0, 1, 0, 1]], [[0, 0, 1, 1, 1, 1]], True),
    ],
)
def test_positions_that_restart(positions: list[list[int]], mask: list[list[int]] | None, expected: bool) -> None:
    assert is_packed(columns(positions, mask)) is expected


def test_other_columns_say_nothing() -> None:
    assert not is_packed({"input_ids": np.zeros((2, 3), np.int64)})
    assert not is_packed({"position_ids": np.zeros((2, 3, 3), np.int64)})
    pairs = {"position_ids": np.array([[0, 1, 0]]), "attention_mask": np.ones((1, 1, 3, 3), np.int64)}
    assert not is_packed(pairs)


def test_a_mask_that_hides_part_of_a_document_is_an_error() -> None:
    with pytest.raises(SpecError, match="attention_mask of row 1 hides the beginning"):
        is_packed(columns([[0, 1, 2, 3], [0, 1, 2, 0]], [[1, 1, 1, 1], [0, 1, 1, 1]]))


def test_a_mask_of_one_file_is_checked_for_what_another_one_packs() -> None:
    packed, left = columns([[0, 1, 0]], [[1, 1, 1]]), columns([[0, 1, 2]], [[0, 1, 1]])
    assert is_packed(packed, columns([[0, 1, 2]], [[1, 1, 1]]))
    assert not is_packed(left)
    with pytest.raises(SpecError, match="attention_mask of row 0 hides the beginning"):
        is_packed(left, packed)


@pytest.mark.parametrize("positions", [range(4), [0, 1, 0, 1]])
@pytest.mark.parametrize("says", [{"cu_seqlens": np.array([0, 3, 4])}, {"seq_idx": np.array([[5, 5, 5, 6]])}])
def test_a_collator_that_contradicts_itself_is_an_error(says: dict[str, np.ndarray], positions: Sequence[int]) -> None:
    ids = {"input_ids": np.array([[7, 8, 9, 7]])}
    with pytest.raises(SpecError, match="do not begin where position_ids restart"):
        columns_of([{}], "train_dataset", lambda _: {**ids, **says, "position_ids": np.array([positions])})
    agreeing = columns_of([{}], "train_dataset", lambda _: {**ids, **says, "position_ids": np.array([[0, 1, 2, 0]])})
    implied = columns_of([{}], "train_dataset", lambda _: {**ids, **says})
    assert np.array_equal(agreeing["position_ids"], implied["position_ids"])


@pytest.mark.parametrize("held_out", [None, [[0, 1, 0]] * 3])
def test_the_driver_and_the_workers_know_it_of_a_file(held_out: list[list[int]] | None, tmp_path: Path) -> None:
    """A file is packed if the other one is, as the model is the same for both."""
    rows = [[0, 1, 0, 1]] * 10 if held_out is None else [[0, 1, 2]] * 10
    paths = []
    for name, positions in (("train", rows), ("other", held_out)):
        if positions is not None:
            np.savez(tmp_path / f"{name}.npz", input_ids=np.array(positions), position_ids=np.array(positions))
            paths.append(str(tmp_path / f"{name}.npz"))
    data = DataSpec(type="arrays", path=paths[0], held_out=paths[1] if held_out else None)
    fields = declared_fields(data)
    assert fields is not None
    assert fields["position_ids"].packed
    prepare_arrays(data, tmp_path / "data")
    assert known_fields(tmp_path / "data") == fields
