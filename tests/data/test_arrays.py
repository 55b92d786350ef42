"""Named arrays: what can be read or is damaged, how they are split, and which rows a step gets."""

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from raypipe.data import Arrays, Corpus, declared_fields, known_fields, open_data, prepare_arrays, validation_weights
from raypipe.errors import SpecError
from raypipe.job import DataSpec
from raypipe.models.task import Field, Labels, Values
from tests.job_files import minimal_job

ROWS = 60
COLUMNS = {
    "pixels": np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 2, 2),
    "flags": np.arange(ROWS) % 3 == 0,
    "labels": np.arange(ROWS, dtype=np.int32),
}


def spec(path, held_out=None):
    return DataSpec(type="arrays", path=str(path), held_out=None if held_out is None else str(held_out))


@pytest.fixture(params=["npz", "safetensors"])
def file(request, tmp_path):
    path = tmp_path / f"data.{request.param}"
    if request.param == "npz":
        np.savez(path, **COLUMNS)
    else:
        save_file({name: torch.from_numpy(column) for name, column in COLUMNS.items()}, path)
    return path


def test_every_row_is_in_one_split_and_rows_stay_together(file, tmp_path):
    arrays = prepare_arrays(spec(file), tmp_path / "data")
    assert (arrays.rows("train"), arrays.rows("val")) == (54, 6)
    seen = []
    for split in ("train", "val"):
        batch = arrays.batch(split, 0, 0, arrays.rows(split))
        assert {name: values.dtype for name, values in batch.items()} == {
            "pixels": torch.float32, "flags": torch.bool, "labels": torch.int64,
        }  # fmt: skip
        assert torch.equal(batch["pixels"][:, 0, 0], batch["labels"] * 4.0)
        assert torch.equal(batch["flags"], batch["labels"] % 3 == 0)
        seen += batch["labels"].tolist()
    assert sorted(seen) == list(range(ROWS))
    assert seen[-6:] != sorted(seen)[-6:]  # held out from all over: arrays are often sorted by class


def test_epochs_visit_every_row_once_in_orders_of_their_own(file, tmp_path):
    arrays = prepare_arrays(spec(file), tmp_path / "data")
    epochs = [arrays.batch("train", 0, step, 54)["labels"].tolist() for step in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(epochs[2]))
    assert epochs[0] != epochs[1] != epochs[2]
    small = torch.cat([arrays.batch("train", 0, step, 9)["labels"] for step in range(6)])
    assert small.tolist() == epochs[0]  # whatever the size of the mini-batch
    assert arrays.batch("train", 1, 0, 54)["labels"].tolist() != epochs[0]
    assert torch.equal(arrays.batch("val", 1, 0, 6)["labels"], arrays.batch("val", 0, 0, 6)["labels"])


def test_a_file_of_its_own_is_held_out(file, tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, **{name: column[:5] for name, column in COLUMNS.items()})
    arrays = prepare_arrays(spec(file, other), tmp_path / "data")
    assert arrays.rows("train") == ROWS
    assert sorted(arrays.batch("val", 0, 0, 5)["labels"].tolist()) == [0, 1, 2, 3, 4]
    np.savez(other, labels=COLUMNS["labels"])
    with pytest.raises(SpecError, match="other fields"):
        prepare_arrays(spec(file, other), tmp_path / "data")


def test_fields_are_known_before_and_after(file, tmp_path):
    declared = declared_fields(spec(file))
    assert declared == {
        "pixels": Field((2, 2), torch.float32), "flags": Field((), torch.bool), "labels": Field((), torch.int64),
    }  # fmt: skip
    arrays = prepare_arrays(spec(file), tmp_path / "data")
    known = known_fields(tmp_path / "data")
    assert known == declared
    for name, column in COLUMNS.items():
        for rows, fields in ((column, declared), (arrays.columns["train"][name], known)):
            first = fields[name].rows
            assert torch.equal(first.read(3), torch.from_numpy(rows[:3].copy()).to(fields[name].dtype))
            assert len(first.read(10**6)) == len(rows)
    assert known_fields(tmp_path) is None
    assert declared_fields(DataSpec(path="stdlib")) is None


def test_what_was_prepared_is_found_again_by_another_process(file, tmp_path):
    arrays = prepare_arrays(spec(file), tmp_path / "data")
    again = Arrays.open(tmp_path / "data")
    for name, values in arrays.batch("train", 3, 2, 7).items():
        assert torch.equal(again.batch("train", 3, 2, 7)[name], values)
    (tmp_path / "data" / "val.labels.npy").unlink()
    with pytest.raises(SpecError, match="prepare the data again"):
        Arrays.open(tmp_path / "data")


def test_narrow_numbers_are_widened_to_what_models_take(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, a=np.zeros((4, 2), np.uint8), b=np.zeros((4, 2), np.float16), c=np.zeros(4, np.float64))
    batch = prepare_arrays(spec(path), tmp_path / "data").batch("train", 0, 0, 2)
    assert [batch[name].dtype for name in "abc"] == [torch.int64, torch.float32, torch.float64]


BAD = {
    "rows that differ": ({"x": np.zeros((4, 2)), "labels": np.zeros(5)}, "x 4, labels 5"),
    "no rows at all": ({"x": np.float32(1)}, "one row per sample"),
    "no arrays": ({}, "holds no arrays"),
    "text": ({"x": np.array(["a", "b"])}, "give numbers"),
    "a name no argument has": ({"a-b": np.zeros(3)}, "name of a model's argument"),
    "one sample": ({"x": np.zeros((1, 2))}, "give more samples"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_samples_is_one_error(case, tmp_path):
    columns, words = BAD[case]
    np.savez(tmp_path / "data.npz", **columns)
    with pytest.raises(SpecError, match=words) as caught:
        prepare_arrays(spec(tmp_path / "data.npz"), tmp_path / "data")
    assert caught.value.where == "data.path"
    assert caught.value.fix


@pytest.mark.parametrize("name", ["missing.npz", "noise.npz", "noise.safetensors", "single.npy", "pickled.npz"])
def test_what_is_no_file_of_arrays_is_one_error(name, tmp_path):
    (tmp_path / "noise.npz").write_bytes(b"not a zip file")
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 64)
    np.save(tmp_path / "single.npy", np.zeros((3, 2)))
    np.savez(tmp_path / "pickled.npz", x=np.array([{"code": 1}, {}], dtype=object))
    with pytest.raises(SpecError, match=r"data\.path"):
        prepare_arrays(spec(tmp_path / name), tmp_path / "data")
    with pytest.raises(SpecError, match=r"data\.path"):
        declared_fields(spec(tmp_path / name))


class Both(Labels):
    """Reads two kinds of labels."""

    reads = frozenset({"labels", "shift_labels"})


@pytest.mark.parametrize("task", [Labels(), Both(), Values()], ids=["labels", "both", "values"])
def test_a_validation_counts_every_row_once(task, tmp_path):
    rows = np.arange(7, dtype=np.int64)
    columns = {"x": rows.astype(np.float32), "labels": rows, "shift_labels": np.stack([rows, rows], 1)}
    for name in ("train", "val"):
        np.savez(tmp_path / f"{name}.npz", **columns)
    prepare_arrays(spec(tmp_path / "train.npz", tmp_path / "val.npz"), tmp_path / "data")
    table = open_data(tmp_path / "data", task)
    first, second, again = (table.batch("val", 3, step, 4) for step in range(3))
    seen = [*first["x"].int().tolist(), *second["x"].int().tolist()[:3]]
    assert sorted(seen) == list(range(7))
    assert int(second["x"][3]) in seen  # fills the mini-batch
    assert first["labels"].tolist() == seen[:4]
    assert second["labels"].tolist()[:3] == seen[4:]
    assert torch.isnan(second["labels"][3]) if isinstance(task, Values) else second["labels"][3] == -100
    assert task.targets(second) == 3
    assert second["shift_labels"][:, 1].tolist() == [*seen[4:], -100 if isinstance(task, Both) else int(second["x"][3])]
    assert (again["labels"] >= 0).all()  # a second pass, where one is asked for
    assert (table.batch("train", 3, 1, 4)["labels"] >= 0).all()
    job = minimal_job({"import": "torch.nn:Linear"}, "rows.npz", {"microbatch": 1}, eval_batches=3)
    assert validation_weights(job, tmp_path / "data") == [4, 3, 4]


# A damaged file of arrays is one error, however it is damaged; so is a damaged note of prepared data.


def spec_of(path: Path) -> DataSpec:
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
            read(spec_of(path))


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
                read(spec_of(path))


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
        declared_fields(spec_of(tmp_path / "data.npz"))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"fields": 3}', '{"fields": {"x": {"shape": 1}}}', "[" * 99_999]
)
def test_a_damaged_note_of_prepared_data(tmp_path: Path, content: str) -> None:
    for name, read in (("arrays.json", known_fields), ("arrays.json", Arrays.open), ("corpus.json", Corpus.open)):
        (tmp_path / name).write_text(content)
        with pytest.raises(SpecError, match="prepare the data again"):
            read(tmp_path)
