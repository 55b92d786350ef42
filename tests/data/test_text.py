"""Text found, split by file and packed; what can't be used is one clear error."""

import json

import numpy as np
import pytest

from raypipe.data import Corpus, prepare
from raypipe.data.text import find_text
from raypipe.errors import SpecError
from raypipe.job import DataSpec


def folder_of(tmp_path, files):
    root = tmp_path / "text"
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def some_text(count, size=200):
    return {f"sub{i % 3}/file{i}.txt": bytes([65 + i % 26]) * size for i in range(count)}


def packed(tmp_path, files, sequence=16):
    return prepare(DataSpec(path=str(folder_of(tmp_path, files))), sequence, tmp_path / "run")


def test_every_byte_of_text_lands_in_one_split(tmp_path):
    files = some_text(60)
    corpus = packed(tmp_path, files)
    both = bytes(corpus.arrays["train"]) + bytes(corpus.arrays["val"])
    assert sorted(both.split(b"\0")[:-1]) == sorted(files.values())
    assert sum(corpus.meta["files"].values()) == 60
    assert 1 <= corpus.meta["files"]["val"] <= 12


def test_the_split_is_by_file_and_a_new_file_moves_no_other(tmp_path):
    def held_out(corpus):
        return set(bytes(corpus.arrays["val"]).split(b"\0")) - {b""}

    files = {f"{i:03}.txt": f"{i:03}".encode() * 50 for i in range(100)}
    before = held_out(packed(tmp_path, files))
    after = held_out(packed(tmp_path, {**files, "new.txt": b"new " * 50}))
    assert before == after - {b"new " * 50}
    assert 2 <= len(before) <= 20


def test_a_small_corpus_still_holds_out_a_file_and_keeps_one(tmp_path):
    corpus = packed(tmp_path, some_text(2))
    assert corpus.meta["files"] == {"train": 1, "val": 1}


def test_one_file_holds_out_its_tail(tmp_path):
    text = bytes(range(1, 251)) * 4
    root = folder_of(tmp_path, {"only.txt": text})
    corpus = prepare(DataSpec(path=str(root / "only.txt")), 16, tmp_path / "run")
    assert bytes(corpus.arrays["train"]) == text[:900] + b"\0"
    assert bytes(corpus.arrays["val"]) == text[900:] + b"\0"


def test_binary_empty_and_hidden_files_are_left_out_and_counted(tmp_path):
    files = {**some_text(4), "image.png": b"\x89PNG\0\0", "empty": b"", ".git/config": b"secret" * 99}
    corpus = packed(tmp_path, files)
    assert corpus.meta["skipped"] == {"binary": 1, "empty": 1}
    assert sum(corpus.meta["files"].values()) == 4
    assert b"secret" not in bytes(corpus.arrays["train"]) + bytes(corpus.arrays["val"])


def test_a_glob_names_files_by_their_common_folder(tmp_path):
    root = folder_of(tmp_path, {**some_text(6), "sub0/notes.md": b"x" * 99})
    result = find_text(f"{root}/**/*.txt")
    assert [file.name for file in result.files] == sorted(some_text(6))


def test_the_standard_library_is_there_without_packages_and_tests():
    result = find_text("stdlib")
    names = {file.name for file in result.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert sum(file.bytes for file in result.files) > 5_000_000


def test_packing_again_gives_the_same_bytes_and_leaves_no_litter(tmp_path):
    first = packed(tmp_path, some_text(30)).meta["sha256"]
    assert packed(tmp_path, some_text(30)).meta["sha256"] == first
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["corpus.json", "train.npy", "val.npy"]
    assert json.loads((tmp_path / "run/corpus.json").read_text())["sequence"] == 16


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.bin": b"\0\1\2", "b.bin": b"x\0"}, "holds no text: 2 binary and 0 empty files"),
        ({"a.txt": b""}, "holds no text: 0 binary and 1 empty"),
        ({"a.txt": b"short"}, "too short: 1 bytes for the train split, but one sample takes 17"),
        ({"a.txt": b"x" * 500, "b.txt": b"y" * 3}, "too short"),
    ],
)
def test_what_cannot_be_trained_on(tmp_path, files, words):
    with pytest.raises(SpecError, match=words) as caught:
        packed(tmp_path, files)
    assert caught.value.where == "data.path"
    assert caught.value.fix


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.txt"])
def test_a_path_that_leads_nowhere(tmp_path, path):
    with pytest.raises(SpecError, match=r"does not exist|no file matches"):
        prepare(DataSpec(path=str(tmp_path / path)), 16, tmp_path / "run")


def test_an_empty_folder(tmp_path):
    (tmp_path / "text").mkdir()
    with pytest.raises(SpecError, match="holds no text: no files"):
        packed(tmp_path, {})


def test_open_needs_a_packed_corpus(tmp_path):
    with pytest.raises(SpecError, match="holds no packed corpus"):
        Corpus.open(tmp_path)
    packed(tmp_path, some_text(30))
    np.save(tmp_path / "run/extra.npy", np.zeros(1))  # other files in the folder don't matter
    assert Corpus.open(tmp_path / "run").sequence == 16
