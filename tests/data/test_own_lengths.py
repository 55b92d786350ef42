"""Rows of their own lengths: how they are kept, padded and split, and what cannot be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from raypipe.data import Arrays, Ragged, declared_fields, flat, known_fields, open_data, prepare_arrays, prepare_data
from raypipe.data.sample_order import GroupedByLength, permuted
from raypipe.errors import SpecError
from raypipe.job import DataSpec
from raypipe.models.task import Field, Labels, MaskedToken, NextToken, Sequences
from tests.job_files import minimal_job

DRAW = np.random.default_rng(1)
LENGTHS = DRAW.integers(1, 22, 40)
TOKENS = [DRAW.integers(1, 90, n) for n in LENGTHS]
COLUMNS = {"input_ids": Ragged.of(TOKENS), "labels": np.arange(40)}


def spec(path, **more):
    return DataSpec(type="arrays", path=str(path), **more)


@pytest.fixture(params=["npz", "safetensors"])
def file(request, tmp_path):
    path = tmp_path / f"data.{request.param}"
    if request.param == "npz":
        np.savez(path, **flat(COLUMNS))
    else:
        save_file({name: torch.from_numpy(values) for name, values in flat(COLUMNS).items()}, path)
    return path


def test_rows_come_whole_padded_and_masked(file, tmp_path):
    prepare_arrays(spec(file), tmp_path / "data")
    data = open_data(tmp_path / "data", Labels(), 8)
    seen = []
    for split, size in (("train", 36), ("val", 4)):
        batch, lengths = data.batch(split, 0, 0, size), data.lengths(split, 0, 0, size)
        assert lengths.keys() == {"input_ids", "attention_mask"}
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (size, int(lengths["input_ids"].max()))
        for row, mask, label, length in zip(
            batch["input_ids"], batch["attention_mask"], batch["labels"].tolist(), lengths["input_ids"], strict=True
        ):
            own = len(TOKENS[label])
            assert row[:own].tolist() == TOKENS[label].tolist()
            assert row[own:].eq(0).all()
            assert mask.tolist() == [1] * own + [0] * (len(row) - own)
            assert length == min(-(-own // 8) * 8, max(LENGTHS))  # never past the longest row
            seen.append(label)
    assert sorted(seen) == list(range(40))


def test_the_longest_row_is_known_before_and_after_also_a_held_out_one(file, tmp_path):
    longest = {"input_ids": Field((int(max(LENGTHS)),), torch.int64), "labels": Field((), torch.int64)}
    longest["attention_mask"] = longest["input_ids"]
    assert declared_fields(spec(file)) == longest
    prepare_arrays(spec(file), tmp_path / "data")
    assert known_fields(tmp_path / "data") == longest
    # Rows of a held-out file may all be equally long, or one longer than any other.
    other = tmp_path / "other.npz"
    np.savez(other, input_ids=np.ones((3, 30), np.int64), labels=np.arange(3))
    for paths in ((file, other), (other, file)):
        both = spec(paths[0], held_out=str(paths[1]))
        assert declared_fields(both)["input_ids"].shape == (30,)
        folder = tmp_path / paths[0].stem / "prepared"
        prepare_arrays(both, folder)
        assert known_fields(folder)["attention_mask"].shape == (30,)
        split = "val" if paths[1] == other else "train"
        assert open_data(folder, Labels(), 8).lengths(split, 0, 0, 3)["input_ids"].tolist() == [30] * 3


def test_the_decoders_tokens_are_as_long_as_the_labels(tmp_path):
    labels = [row[: max(1, len(row) // 2)] for row in TOKENS]
    np.savez(tmp_path / "data.npz", **flat({"input_ids": Ragged.of(TOKENS), "labels": Ragged.of(labels)}))
    prepare_arrays(spec(tmp_path / "data.npz"), tmp_path / "data")
    task = Sequences(start_token=5, padding=3)
    data = open_data(tmp_path / "data", task)
    batch, lengths = data.batch("train", 0, 0, 6), data.lengths("train", 0, 0, 6)
    assert lengths["decoder_input_ids"].tolist() == lengths["labels"].tolist()
    for row in range(6):
        own = int(lengths["labels"][row])
        assert batch["decoder_input_ids"][row, :own].tolist() == [5, *batch["labels"][row, : own - 1].tolist()]
        assert batch["labels"][row, own:].eq(-100).all()
        assert batch["decoder_input_ids"][row, own + 1 :].eq(3).all()
        assert batch["input_ids"][row, int(lengths["input_ids"][row]) :].eq(3).all()


BAD = {
    "an empty row": ({"input_ids": np.arange(3), "input_ids.offsets": np.array([0, 2, 2, 3])}, "row 1 is empty"),
    "offsets past the end": ({"x": np.arange(3), "x.offsets": np.array([0, 2, 4])}, "where the rows of x begin"),
    "offsets that are no numbers": ({"x": np.arange(3), "x.offsets": np.array([0.5, 3.0])}, "where the rows of x"),
    "offsets of nothing": ({"x.offsets": np.array([0, 2])}, "has no rows that it belongs to"),
    "floats": ({"x": np.ones(3), "x.offsets": np.array([0, 1, 3])}, "which is not padded"),
    "columns of other counts": (
        {"x": np.arange(3), "x.offsets": np.array([0, 1, 3]), "labels": np.arange(3)}, "x 2, labels 3",
    ),
    "a token without a label": (
        {"input_ids": np.arange(4), "input_ids.offsets": np.array([0, 2, 4]),
         "labels": np.arange(3), "labels.offsets": np.array([0, 2, 3])}, "row 1 has 2 input_ids and 1 labels",
    ),
    "a mask of one length": (
        {"input_ids": np.arange(4), "input_ids.offsets": np.array([0, 1, 4]), "attention_mask": np.ones((2, 3))},
        "row 0 has 1 input_ids and 3 attention_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_rows_is_one_error(case, tmp_path):
    arrays, words = BAD[case]
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(SpecError, match=words) as caught:
        prepare_arrays(spec(tmp_path / "data.npz"), tmp_path / "data", per_token=True)
    assert caught.value.where == "data.path"
    assert caught.value.fix


def lines_job(path, sequence=20):
    return minimal_job(
        {"type": "gpt", "layers": 1, "hidden": 8, "heads": 1, "sequence": sequence},
        {"type": "lines", "path": str(path)},
    )


def prepared(path, folder, task, sequence=20):
    prepare_data(lines_job(path, sequence), task, folder)
    return open_data(folder, task, 4)


def test_lines_predict_their_next_byte_and_their_end(tmp_path):
    lines = [f"{i}" * (1 + i % 9) for i in range(30)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines[:15]) + "\r\n  \n")
    records = "\n".join('{"text": "%s", "id": %d}' % (line, i) for i, line in enumerate(lines[15:]))  # noqa: UP031
    (tmp_path / "b.jsonl").write_text(records)
    data = prepared(tmp_path, tmp_path / "run", NextToken())
    seen = []
    for split, size in (("train", 27), ("val", 3)):
        batch, lengths = data.batch(split, 0, 0, size), data.lengths(split, 0, 0, size)
        for row in range(size):
            own = int(batch["attention_mask"][row].sum())
            text = bytes(batch["input_ids"][row, :own].tolist())
            assert batch["shift_labels"][row].tolist() == [*text[1:], 0] + [-100] * (batch["input_ids"].shape[1] - own)
            assert lengths["input_ids"][row] == lengths["shift_labels"][row] == min(-(-own // 4) * 4, 18)
            seen.append(text.decode())
    assert sorted(seen) == sorted(lines)


def test_masks_of_a_line_do_not_depend_on_the_lines_beside_it(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join("abcdefghijklmnop"[: 1 + i % 16] for i in range(40)))
    data = prepared(tmp_path / "a.txt", tmp_path / "run", MaskedToken(256, 0.4))
    few, many = data.batch("train", 0, 0, 4), data.batch("train", 0, 0, 8)
    for row in range(4):
        own = int(few["attention_mask"][row].sum())
        for name in ("input_ids", "labels"):
            assert torch.equal(few[name][row, :own], many[name][row, :own])
        assert few["labels"][row, own:].eq(-100).all()
    assert many["input_ids"].eq(256).any()


def test_lines_that_cannot_be_samples_are_one_error(tmp_path):
    (tmp_path / "long.txt").write_text("short\n" + "x" * 21 + "\n" + "y" * 30)
    with pytest.raises(SpecError, match=r"2 of 3 lines take more than 20 bytes; long.txt, line 3 takes 30"):
        prepared(tmp_path / "long.txt", tmp_path / "run", NextToken())
    for record, words in (('{"txt": "a"}', "not a JSON object with a text"), ("[1]", "not a JSON object"),
                          ('{"text": ""}', "its text is empty")):  # fmt: skip
        (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + record)
        with pytest.raises(SpecError, match=f"bad.jsonl, line 2: {words}"):
            prepared(tmp_path / "bad.jsonl", tmp_path / "run", NextToken())
    (tmp_path / "one.txt").write_text("one line\n\n")
    with pytest.raises(SpecError, match="holds 1 lines"):
        prepared(tmp_path / "one.txt", tmp_path / "run", NextToken())


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=400), st.integers(1, 7), st.integers(0, 1 << 63))
def test_rows_of_similar_lengths_come_together(lengths, batch, key) -> None:
    """Each row once an epoch; the pieces are those of the shuffled order, sorted as transformers' sampler does."""
    grouped = GroupedByLength(np.array(lengths))
    size = len(lengths)
    rows = [grouped.place(key, position, batch) for position in range(size)]
    assert sorted(rows) == list(range(size))
    shuffled = [permuted(key, size, position) for position in range(size)]
    piece = max(1, min(size // (batch * 4), 50)) * batch
    for begin in range(0, size, piece):
        theirs = sorted(shuffled[begin : begin + piece], key=lambda row: lengths[row], reverse=True)
        assert rows[begin : begin + piece] == theirs


def test_less_is_padding_when_rows_are_grouped(tmp_path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 512)
    np.savez(tmp_path / "rows.npz", x=np.zeros(int(lengths.sum()), np.int64), **{"x.offsets": np.cumsum([0, *lengths])})
    padded = {}
    for grouped in (False, True):
        data = DataSpec(type="arrays", path=str(tmp_path / "rows.npz"), group_by_length=grouped)
        arrays = prepare_arrays(data, tmp_path / str(grouped))
        assert arrays.grouped is Arrays.open(tmp_path / str(grouped)).grouped is grouped
        steps = arrays.rows("train") // 8
        seen = [row for step in range(steps) for row in arrays.places("train", 1, step, 8)]
        assert len(set(seen)) == len(seen)
        padded[grouped] = sum(8 * int(arrays.lengths("train", 1, step, 8)["x"].max()) for step in range(steps))
        held_out = arrays.places("val", 1, 0, 8)
    assert held_out == Arrays.open(tmp_path / "False").places("val", 1, 0, 8)
    own = int(lengths.sum()) * 0.9
    assert padded[True] < 1.1 * own < 1.5 * own < padded[False]
