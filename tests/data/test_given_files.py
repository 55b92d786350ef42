"""Files as people have them: with byte order marks, blank lines, compressed, in every type of Arrow, wrongly named."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.data.documents.prepared import PreparedDocuments, prepare_documents
from raypipe.data.ragged import Ragged
from raypipe.data.text import LINE, prepare, prepare_lines
from raypipe.errors import SpecError
from raypipe.job import DataSpec
from raypipe.job.spec import job_from

TEXTS = [f"alpha béta {i} " * (1 + i % 3) for i in range(70)]
JSONL = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
NUMBERS = [list(range(i % 5, i % 5 + 8)) for i in range(70)]
BOM = codecs.BOM_UTF8


def zstd(content: bytes) -> bytes:
    half = len(content) // 2  # two frames, as pzstd writes
    return b"".join(pa.compress(one, codec="zstd", asbytes=True) for one in (content[:half], content[half:]))


def documents(path: Path, column: str = "text", block_mb: float = 0.002) -> list[bytes]:
    """The documents that are found, each without the byte that ends it; the tokens of the whole, for numbers."""
    job = job_from({
        "name": "d", "model": {"type": "gpt", "layers": 1, "hidden": 8, "heads": 2, "sequence": 6},
        "data": {"type": "documents", "path": str(path), "column": column, "block_mb": block_mb},
        "train": {"steps": 1, "batch": 2},
    })  # fmt: skip
    prepare_documents(job, 6, path.parent / "prepared")
    splits = PreparedDocuments.open(path.parent / "prepared").splits.values()
    packed = b"".join(bytes(one.packed(number)) for one in splits for number in range(len(one.blocks)))
    return sorted(packed.split(b"\0")[:-1]) if column == "text" else [packed]


def lines(path: Path) -> list[bytes]:
    arrays = prepare_lines(DataSpec(type="lines", path=str(path)), 200, path.parent / "prepared")
    columns = [c for split in arrays.columns.values() if isinstance(c := split[LINE], Ragged)]
    pieces = [(c, i) for c in columns for i in range(len(c))]
    return sorted(bytes(c.values[c.offsets[i] : c.offsets[i + 1]]) for c, i in pieces)


RECORDS: dict[str, bytes] = {
    "a.jsonl": JSONL,
    "a.JSONL": JSONL,
    "a.ndjson": JSONL,
    "a.json": JSONL,
    "bom.jsonl": BOM + JSONL,
    "blank.jsonl": b"\n \r\n" + JSONL,
    "between.jsonl": JSONL.replace(b"\n", b"\r\n\r\n"),
    "bom-blank.ndjson": BOM + b"\n" + JSONL,
    "a.jsonl.gz": gzip.compress(JSONL[:999]) + gzip.compress(JSONL[999:]),
    "a.json.GZ": gzip.compress(BOM + JSONL),
    "a.jsonl.zst": zstd(JSONL),
}


@pytest.mark.parametrize("read", [documents, lines])
@pytest.mark.parametrize("name", RECORDS)
def test_records_are_the_same_however_they_are_written(name: str, read: Callable, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(RECORDS[name])
    assert read(tmp_path / name) == sorted(text.encode() for text in TEXTS)


@pytest.mark.parametrize("pack", [lambda c: BOM + c, gzip.compress, zstd])
@pytest.mark.parametrize("read", [documents, lines, "bytes"])
def test_text_is_the_same_however_it_is_written(pack: Callable, read: Callable | str, tmp_path: Path) -> None:
    text = "\n".join(TEXTS).encode()
    name = {b"\x1f\x8b": "a.txt.gz", b"\x28\xb5": "a.txt.zst"}.get(pack(text)[:2], "a.txt")
    (tmp_path / name).write_bytes(pack(text))
    if read == "bytes":
        corpus = prepare(DataSpec(path=str(tmp_path / name)), 16, tmp_path / "prepared")
        assert b"".join(bytes(array)[:-1] for array in corpus.arrays.values()) == text
    elif read is lines:
        assert lines(tmp_path / name) == sorted(text.splitlines())
    else:  # one document is too short to hold out some of it, so there are more
        for number in range(40):
            (tmp_path / "d").mkdir(exist_ok=True)
            (tmp_path / "d" / f"{number}{name}").write_bytes(pack(b"%d" % number + text))
        assert documents(tmp_path / "d", block_mb=1) == sorted(b"%d" % number + text for number in range(40))


TEXT_TYPES = {
    "string": pa.string(), "large": pa.large_string(), "view": pa.string_view(), "binary": pa.binary(),
    "large binary": pa.large_binary(), "binary view": pa.binary_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "dictionary of large": pa.dictionary(pa.int8(), pa.large_string()),
}  # fmt: skip
NUMBER_TYPES = {
    "list": pa.list_(pa.int32()), "large": pa.large_list(pa.uint16()), "fixed": pa.list_(pa.int64(), 8),
    "view": pa.list_view(pa.int32()), "large view": pa.large_list_view(pa.uint8()),
}  # fmt: skip


def _table(values: list, kind: pa.DataType, name: str) -> pa.Table:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    made = pa.array([v.encode() if "binary" in str(kind) else v for v in values], plain)
    return pa.table({"id": list(range(len(values))), name: made.cast(kind)})


def _write(table: pa.Table, path: Path, form: str) -> Path:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=30)
        return path
    with pa.OSFile(str(path), "wb") as out:
        new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    return path


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
@pytest.mark.parametrize("kind", TEXT_TYPES)
def test_every_type_of_text(kind: str, form: str, tmp_path: Path) -> None:
    path = _write(
        _table(TEXTS, TEXT_TYPES[kind], "text"), tmp_path / f"a.{'parquet' if form == 'parquet' else 'arrow'}", form
    )
    assert documents(path) == sorted(text.encode() for text in TEXTS)


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
@pytest.mark.parametrize("kind", NUMBER_TYPES)
def test_every_type_of_token_numbers(kind: str, form: str, tmp_path: Path) -> None:
    table = _table(NUMBERS, NUMBER_TYPES[kind], "doc.ids")
    path = _write(table, tmp_path / f"a.{'parquet' if form == 'parquet' else 'arrow'}", form)
    result = documents(path, "doc.ids")[0]
    assert sorted(result) == sorted(token for numbers in NUMBERS for token in numbers)


def test_what_only_arrow_can_store(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays([30, 70], ["first text", "second one"])
    _write(pa.table({"text": runs}), tmp_path / "a.arrow", "stream")
    assert documents(tmp_path / "a.arrow") == sorted([b"first text"] * 30 + [b"second one"] * 40)


def test_shards_without_rows_and_of_null_type(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for number, column in enumerate(
        [pa.array([], pa.null()), pa.array([], pa.string()), pa.array(TEXTS), pa.array([], pa.null())]
    ):
        pq.write_table(pa.table({"text": column}), folder / f"{number}.parquet")
    assert documents(folder) == sorted(text.encode() for text in TEXTS)
    lone = tmp_path / "lone.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.null())}), lone)
    with pytest.raises(SpecError, match="text holds no values in any file"):
        documents(lone)


def test_a_column_whose_name_has_dots_beside_one_with_fields(tmp_path: Path) -> None:
    table = pa.table({"doc": [{"text": "no", "id": 1}] * 70, "doc.text": TEXTS})
    pq.write_table(table.select(["doc.text"]), tmp_path / "a.parquet")
    texts = [text.encode() for text in TEXTS]
    assert documents(tmp_path / "a.parquet", "doc.text")[0].split(b"\0")[0] == texts[0]
    pq.write_table(table, tmp_path / "b.parquet")
    assert documents(tmp_path / "b.parquet", "doc.text")[0].split(b"\0")[0] == texts[0]


@pytest.mark.parametrize("read", [documents, lines])
def test_hidden_files_and_folders_are_passed_over(read: Callable, tmp_path: Path) -> None:
    folder = tmp_path / ".mine" / "d"  # hidden above the folder that is given does not count
    for name in ("a.jsonl", ".b.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "in/.cache/c.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(JSONL)
    assert read(folder) == sorted(text.encode() for text in TEXTS)


def test_what_describes_a_folder_of_parquet_is_not_a_document(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d/a.parquet")
    (tmp_path / "d/dataset_info.json").write_text('{\n"features": 1\n}')
    assert documents(tmp_path / "d") == sorted(text.encode() for text in TEXTS)


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": TEXTS}), sink)
    return sink.getvalue().to_pybytes()


MISTAKEN = {
    "parquet as jsonl": ("a.jsonl", _parquet(), "is read as JSON, .* by its name, but looks like Parquet"),
    "parquet as text": ("a.txt", _parquet(), "but looks like Parquet"),
    "gzip as jsonl": ("a.jsonl", gzip.compress(JSONL), r"looks like gzip\n.*name it a.jsonl.gz"),
    "zstd as text": ("a.txt", zstd(JSONL), r"looks like zstd\n.*name it a.txt.zst"),
    "jsonl as gzip": ("a.jsonl.gz", JSONL, "named as gzip, but is not compressed so"),
    "jsonl as text": ("a.txt", BOM + b"\n" + JSONL, r"looks like JSON.*\n.*name it a.jsonl"),
    "jsonl as compressed text": ("a.txt.gz", gzip.compress(JSONL), "looks like JSON"),
    "parquet in gzip": ("a.jsonl.gz", gzip.compress(_parquet()), "looks like Parquet"),
    "UTF-16": ("a.jsonl", JSONL.decode().encode("utf-16"), r"looks like UTF-16\n.*save it as UTF-8"),
    "zip": ("a.txt", b"PK\x03\x04" + b"\0" * 50, "looks like zip"),
    "pointer": ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(JSONL)[:-30], "can't read .*a.jsonl.gz: Compressed file ended"),
    "cut zstd": ("a.jsonl.zst", zstd(JSONL)[:-30], "can't read .*a.jsonl.zst: Truncated"),
    "one document": ("a.json", b'{\n  "text": "a"\n}', "line 1: not a JSON object: the file is one JSON document"),
    "array": ("a.json", b'[{"text": "a"}]\n', "line 1: not a JSON object but a list"),
    "csv": ("a.jsonl", b"id,text\n1,a\n", "line 1: not a JSON object: "),
    "second line": ("a.jsonl", b'\n{"text": "a"}\n\n{"text": 4}\n', "line 4: "),
}  # fmt: skip


@pytest.mark.parametrize("read", [documents, lines])
@pytest.mark.parametrize("case", MISTAKEN)
def test_a_file_of_another_format_than_its_name_says_is_an_error(case: str, read: Callable, tmp_path: Path) -> None:
    name, content, says = MISTAKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=says) as caught:
        read(tmp_path / name)
    assert caught.value.fix


TABLES = {
    "jsonl as parquet": ("a.parquet", JSONL, "is read as Parquet by its name, but looks like JSON"),
    "arrow as parquet": ("a.parquet", b"ARROW1\0\0", "looks like Arrow"),
    "parquet as arrow": ("a.arrow", _parquet(), "looks like Parquet"),
    "compressed": ("a.parquet.gz", gzip.compress(_parquet()), "compressed Parquet.*\n.*unpack it"),
    "unknown": ("a.csv", b"id,text\n", "has no known format"),
    "latin-1": ("a.txt", b"good\nb\xe4d\n", r"can't read .*a.txt, line 2: 'utf-8'.*\n.*save it as UTF-8"),
}


@pytest.mark.parametrize("case", TABLES)
def test_documents_that_are_no_tables(case: str, tmp_path: Path) -> None:
    name, content, says = TABLES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=says):
        documents(tmp_path / name)


@pytest.mark.parametrize(
    ("later", "says"),
    [
        (pa.array(list(range(50))), "text of .*1.parquet holds int64"),
        (pa.array([[1, 2]] * 50), "holds list.*, but the files before hold text"),
        (pa.array(["a", None]), 'row 1 of group 0 has no "text"'),
        (pa.array([b"a", b"\xff"]), "row 1 of group 0: 'utf-8'"),
        (pa.array(["a", None]).dictionary_encode(), 'row 1 of group 0 has no "text"'),
    ],
)
def test_a_later_shard_of_another_kind(later: pa.Array, says: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d/0.parquet")
    pq.write_table(pa.table({"text": later}), tmp_path / "d/1.parquet")
    with pytest.raises(SpecError, match=says):
        documents(tmp_path / "d")


def test_numbers_with_gaps_or_too_large(tmp_path: Path) -> None:
    for values, says in (([[1] * 20, [1, None]], "null among its numbers"), ([[1] * 20, [2**63]], "beyond 2")):
        kind = pa.list_(pa.uint64())
        pq.write_table(pa.table({"ids": pa.array(values, kind)}), tmp_path / "a.parquet")
        with pytest.raises(SpecError, match=says):
            documents(tmp_path / "a.parquet", "ids")


def test_bytes_are_bytes_whatever_they_say(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(JSONL)
    corpus = prepare(DataSpec(path=str(tmp_path / "a.txt")), 16, tmp_path / "prepared")
    assert b"".join(bytes(array)[:-1] for array in corpus.arrays.values()) == JSONL
    (tmp_path / "a.txt").write_bytes(_parquet())
    with pytest.raises(SpecError, match="looks like Parquet"):
        prepare(DataSpec(path=str(tmp_path / "a.txt")), 16, tmp_path / "prepared")
    (tmp_path / "a.parquet").write_bytes(_parquet())
    with pytest.raises(SpecError, match=r"1 binary.*\n.*documents reads Parquet"):
        prepare(DataSpec(path=str(tmp_path / "a.parquet")), 16, tmp_path / "prepared")
