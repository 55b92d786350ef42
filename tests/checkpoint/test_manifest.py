"""A manifest whose digest is right and whose values are of other types is refused by name; tests/safety tries any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.checkpoint import commit, latest, open_checkpoint, step_directory, write_shard
from raypipe.checkpoint.write import save_manifest
from raypipe.errors import CheckpointError

SHA = "0" * 64
WHOLE = {"step": 3, "files": [], "keys": {}, "meta": {}}
WRONG = [
    ({"step": "3"}, "step is not a whole number"),
    ({"step": True}, "step is not a whole number"),
    ({"step": 3.5}, "step is not a whole number"),
    ({"step": -1}, "step is below 0"),
    ({"files": {}}, "files is not a list"),
    ({"files": None}, "files is not a list"),
    ({"files": ["x"]}, r"files\[0\] is not an object"),
    ({"files": [{"file": "x", "bytes": 1}]}, r"files\[0\] is not an object"),
    ({"files": [{"file": "../x", "bytes": 1, "sha256": SHA}]}, r"files\[0\].file is not the name"),
    ({"files": [{"file": "..", "bytes": 1, "sha256": SHA}]}, r"files\[0\].file is not the name"),
    ({"files": [{"file": "x", "bytes": "1", "sha256": SHA}]}, r"files\[0\].bytes"),
    ({"files": [{"file": "x", "bytes": 1, "sha256": None}]}, r"files\[0\].sha256"),
    ({"keys": []}, "keys is not an object"),
    ({"keys": {"param/0.w": "elsewhere"}}, "param/0.w is in none of its files"),
    ({"keys": {"param/0.w": 3}}, "param/0.w is in none of its files"),
    ({"meta": None}, "meta is not an object"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[str(c) for c, _ in WRONG])
def test_wrong_types_are_named(tmp_path: Path, change: dict, words: str) -> None:
    save_manifest(tmp_path, WHOLE | change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("key", list(WHOLE))
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    save_manifest(tmp_path, {k: v for k, v in WHOLE.items() if k != key})
    with pytest.raises(CheckpointError, match=f"{key} is not"):
        open_checkpoint(tmp_path)


def test_a_manifest_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"step": ' + "[" * 200_000)
    with pytest.raises(CheckpointError, match="is damaged: nested too deeply"):
        open_checkpoint(tmp_path)


def test_a_manifest_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("version", [True, 1.0, "1", None])
def test_a_version_of_another_type(tmp_path: Path, version: object) -> None:
    save_manifest(tmp_path, WHOLE | {"version": version})
    with pytest.raises(CheckpointError, match="has format version"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["step-²", "step-٣", "step-", "step-1x", "step-" + "9" * 200])
def test_folders_whose_names_are_no_steps_are_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert latest(tmp_path) == (None, [])
    directory = step_directory(tmp_path, 5)
    whole = commit(directory, 5, [write_shard(directory, "rank-00000", {"param/0.w": torch.zeros(2)})], {})
    assert latest(tmp_path) == (whole, [])
