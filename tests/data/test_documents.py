"""Documents packed into samples: every token once an epoch, in an order that only seed and step decide."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.data import is_prepared, open_data, prepare_data
from raypipe.data.documents import META
from raypipe.data.documents.prepared import Blocks, Documents
from raypipe.data.documents.samples import BlockOrder, Windows, samples_in
from raypipe.data.documents.sources import FilePart, blocks_of
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec, job_from
from raypipe.models.task import MaskedToken, NextToken, Task
from tests.data.documents_on_disk import WRITERS, some_documents, write_jsonl, write_parquet

LENGTH = 16


def job_of(path: Path, vocabulary: int = 256, sequence: int = LENGTH, **data: object) -> JobSpec:
    return job_from(
        {
            "name": "documents",
            "model": {
                "type": "gpt", "layers": 2, "hidden": 8, "heads": 2, "sequence": sequence, "vocabulary": vocabulary,
            },
            "data": {"type": "documents", "path": str(path), "block_mb": 0.01, "shuffle_blocks": 3, **data},
            "train": {"steps": 2, "batch": 4},
            "parallel": {"stages": 1, "microbatch": 2},
        }
    )  # fmt: skip


def opened(job: JobSpec, folder: Path, task: Task | None = None) -> Documents:
    task = task or NextToken()
    prepare_data(job, task, folder)
    assert is_prepared(folder)
    result = open_data(folder, task)
    assert isinstance(result, Documents)
    return result


def rows_of(data: Documents, step: int, batch: int, seed: int = 0, split: str = "train") -> list[bytes]:
    """Each sample with the token that follows it."""
    read = data.batch(split, seed, step, batch)
    both = np.concatenate([read["input_ids"].numpy(), read["shift_labels"].numpy()[:, -1:]], axis=1)
    return [bytes(row.astype(np.uint8)) for row in both]


@pytest.mark.parametrize("format", WRITERS)
def test_an_epoch_holds_every_sample_once_in_every_format(format: str, tmp_path: Path) -> None:
    documents = some_documents(400)
    path = WRITERS[format](tmp_path / f"data.{format}", documents)
    held_out = write_parquet(tmp_path / "val.parquet", some_documents(20, seed=1))
    data = opened(job_of(path, held_out=str(held_out)), tmp_path / "run")
    samples = data.samples("train")
    rows = rows_of(data, 0, samples)
    # Every sample begins where the one before ended, so its tokens, end to end, are the documents in their order:
    # block by block, and the last of each block overlaps.
    text = "\0".join(documents).encode() + b"\0"
    assert len(set(rows)) > samples * 0.9
    assert all(row in text for row in rows)
    assert abs(samples * LENGTH - len(text)) < LENGTH * 20
    pairs = Counter(text[i : i + 2] for i in range(len(text) - 1))
    result = Counter(row[i : i + 2] for row in rows for i in range(LENGTH))
    # Pairs of neighbours lie in one sample, except those at the ends of blocks.
    assert sum((pairs - result).values()) <= 20
    assert sorted(rows_of(data, 1, samples)) == sorted(rows)
    assert rows_of(data, 1, samples) != rows


def test_the_order_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", some_documents(100))
    whole = opened(job_of(path), tmp_path / "run")
    straight = [rows_of(whole, step, 8) for step in range(300)]
    assert whole.samples("train") < 300 * 8, "it takes more than one epoch"
    for step in (299, 0, 151, 150, 152, 40):  # also backwards, in a process that knows nothing of the steps before
        assert rows_of(open_data(tmp_path / "run", NextToken()), step, 8) == straight[step]
    assert [row for step in range(150) for row in rows_of(whole, step, 16)] == [r for rows in straight for r in rows]
    assert rows_of(whole, 0, 8, seed=1) != straight[0]
    assert rows_of(whole, 0, 4, seed=1, split="val") == rows_of(whole, 0, 4, seed=2, split="val")


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    documents = [f"<{number:04}>" * 30 for number in range(320)]
    path = write_parquet(tmp_path / "a.parquet", documents, group=320)
    data = opened(job_of(path, block_mb=1), tmp_path / "run")
    seen = {
        split: {d[:6] for rows in [rows_of(data, 0, data.samples(split), split=split)] for d in documents
                for row in rows if d[:6].encode() in row}
        for split in ("train", "val")
    }  # fmt: skip
    assert len(seen["val"]) == 10
    assert not seen["train"] & seen["val"]
    assert len(seen["train"]) == 310


@pytest.mark.parametrize("lines", [True, False])
def test_the_end_of_a_lone_document_is_held_out(lines: bool, tmp_path: Path) -> None:
    text = "".join(f"{number:07}{chr(10) if lines else '-'}" for number in range(200))
    (tmp_path / "a.txt").write_text(text)
    data = opened(job_of(tmp_path / "a.txt", block_mb=1), tmp_path / "run")
    train, val = ({row for row in rows_of(data, 0, data.samples(s), split=s)} for s in ("train", "val"))
    assert any(row.startswith(b"0000000") for row in train)
    assert any(row.startswith(b"0000180") for row in val)
    assert not any(b"0000180" in row for row in train)
    assert any(b"0000179" in row for row in train)
    assert any(row.endswith(b"\0") for row in val)
    assert not any(b"\0" in row for row in train), "it goes on in what is held out"

    record = tmp_path / "run" / META
    about = json.loads(record.read_text())
    for split in about["splits"].values():
        del split["divides_one"]
    record.write_text(json.dumps(about))
    assert any(b"0000199" in row for row in rows_of(open_data(tmp_path / "run", NextToken()), 0, 100)), "as it began"


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 4), st.integers(2, 9), st.integers(0, 99))
@settings(max_examples=60)
def test_any_sample_can_be_found_without_the_others(sizes: list[int], together: int, window: int, seed: int) -> None:
    """Against a list of all samples of two epochs, made the plain way."""
    if not any(samples_in(size, window) for size in sizes):
        return
    begins = np.cumsum([0, *sizes])
    tokens = [np.arange(a, b) for a, b in pairwise(begins)]
    order = BlockOrder("train", seed, len(sizes), together)

    def reader() -> Windows:
        return Windows(order, window, {}, lambda numbers: (tokens[number] for number in numbers))

    every = []
    for epoch in range(2):
        for number in range(order.windows):
            result = []
            for one in (tokens[block] for block in order.window(epoch, number)):
                cut = [one[i : i + window + 1] for i in range(0, len(one) - window, window)]
                if len(one) > window and (len(one) - 1) % window:
                    cut.append(one[-window - 1 :])
                result += cut
            every += [result[order.sample(epoch, number, len(result), place)] for place in range(len(result))]
    epochs = Counter(tuple(row) for row in every[: len(every) // 2])
    assert epochs == Counter(tuple(row) for row in every[len(every) // 2 :]), "each epoch has the same samples"
    straight = reader()
    assert all((straight.rows([number]) == row).all() for number, row in enumerate(every))
    for number in {0, len(every) // 3, len(every) - 1}:
        assert (reader().rows([number]) == every[number]).all()
        assert (straight.rows([number]) == every[number]).all()
    assert straight.epoch() == len(every) // 2


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 900)), min_size=1, max_size=30), st.integers(10, 400))
@settings(max_examples=60)
def test_blocks_cover_all_rows_once_and_are_of_about_one_size(groups: list[tuple[int, int]], size: int) -> None:
    parts = [FilePart("f", number, 0, rows, bytes_) for number, (rows, bytes_) in enumerate(groups)]
    blocks = blocks_of(parts, size)
    result = [
        (part.group, row) for block in blocks for part in block for row in range(part.first, part.first + part.rows)
    ]
    assert result == [(number, row) for number, (rows, _) in enumerate(groups) for row in range(rows)]
    largest_row = max(-(-bytes_ // rows) for rows, bytes_ in groups)
    assert all(sum(part.size for part in block) <= 3 * size + 2 * largest_row for block in blocks)


def test_a_tokenizer_of_local_files(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "</s>": 1, "red": 2, "blue": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tok").mkdir()
    words.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    path = write_jsonl(tmp_path / "a.jsonl", ["red blue green"] * 40)
    data = opened(job_of(path, vocabulary=4, sequence=3, tokenizer=str(tmp_path / "tok")), tmp_path / "run")
    rows = rows_of(data, 0, data.samples("train"))
    assert set(rows) == {bytes([2, 3, 0, 1]), bytes([3, 0, 1, 2]), bytes([0, 1, 2, 3]), bytes([1, 2, 3, 0])}
    with pytest.raises(SpecError, match="4 tokens"):
        opened(job_of(path, vocabulary=3, sequence=3, tokenizer=str(tmp_path / "tok")), tmp_path / "run2")


def test_token_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    documents = [list(range(n % 7, n % 7 + 20)) for n in range(60)]
    pq.write_table(pa.table({"input_ids": documents}), tmp_path / "a.parquet")
    data = opened(job_of(tmp_path / "a.parquet", column="input_ids"), tmp_path / "run")
    kept = [token for n, document in enumerate(documents) if n % 32 != 31 for token in document]
    # One block: the samples are consecutive pieces of all documents.
    rows = {bytes(kept[i : i + LENGTH + 1]) for i in range(0, len(kept) - LENGTH, LENGTH)}
    assert rows <= set(rows_of(data, 0, data.samples("train")))
    with pytest.raises(SpecError, match="token 20, the model knows 20"):
        opened(job_of(tmp_path / "a.parquet", column="input_ids", vocabulary=20), tmp_path / "run2")


def test_a_measurement_reads_one_block(tmp_path: Path, monkeypatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", some_documents(200))
    opened(job_of(path), tmp_path / "run")
    read: list[int] = []
    monkeypatch.setattr(
        Blocks, "packed", lambda self, number, of=Blocks.packed: read.append(number) or of(self, number)
    )
    data = open_data(tmp_path / "run", NextToken(), whole=False)
    assert len(rows_of(data, 0, 2000)) == 2000
    open_data(tmp_path / "run", NextToken(), whole=False).batch("train", 0, 5, 8)
    assert read == [0]


def test_masks_do_not_depend_on_which_rows_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", some_documents(100))
    data = opened(job_of(path), tmp_path / "run", MaskedToken(0, 0.3))
    assert 0.2 < (data.batch("train", 0, 1, 50)["labels"] != -100).float().mean() < 0.4


BAD = {
    "no file": (lambda p: "nowhere/*.parquet", {}, "names no files"),
    "not parquet": (lambda p: _written(p / "a.parquet", b"PAR1 no"), {}, "can't read .*a.parquet"),
    "other column": (lambda p: write_parquet(p / "a.parquet", ["x"]), {"column": "txet"}, 'did you mean "text"'),
    "no text": (lambda p: write_parquet(p / "a.parquet", ["x"]), {"column": "id"}, "id of .* holds int64"),
    "null": (lambda p: write_parquet(p / "a.parquet", ["long enough"] * 60 + [None]), {}, "row 10 of group 1 has no"),
    "bad json": (lambda p: _written(p / "a.jsonl", b'{"text": "a"}\n{"text": \n'), {}, "can't read .*a.jsonl"),
    "no object": (lambda p: _written(p / "a.jsonl", b"[1]\n"), {}, "line 1: not a JSON object"),
    "not utf-8": (lambda p: _written(p / "a.txt", b"\xff" * 99), {}, "can't read .*a.txt"),
    "too short": (lambda p: write_parquet(p / "a.parquet", ["x", "y"]), {}, "a sample takes 17"),
    "no tokenizer": (lambda p: write_parquet(p / "a.parquet", ["x"]), {"tokenizer": "gpt2"}, "does not exist"),
    "two formats": (lambda p: _both(p), {}, "jsonl and parquet files"),
}  # fmt: skip


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _both(folder: Path) -> Path:
    write_parquet(folder / "a.parquet", ["x"])
    write_jsonl(folder / "b.jsonl", ["x"])
    return folder


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_one_clear_error(case: str, tmp_path: Path) -> None:
    make, data, says = BAD[case]
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(SpecError, match=says):
        opened(job_of(make(folder), **data), tmp_path / "run")


def test_a_file_that_changes_under_a_run_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", some_documents(100))
    opened(job_of(path), tmp_path / "run")
    write_parquet(path, some_documents(101))
    with pytest.raises(SpecError, match="has changed since the run began"):
        open_data(tmp_path / "run", NextToken()).batch("train", 0, 0, 1)


@pytest.mark.parametrize(("key", "value"), [("column", "body"), ("tokenizer", "t"), ("num_workers", 4)])
def test_keys_that_would_be_ignored_are_refused(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"data.{key}: has no effect on bytes"):
        job_of(tmp_path, type="bytes", block_mb=8.0, shuffle_blocks=8, **{key: value})
