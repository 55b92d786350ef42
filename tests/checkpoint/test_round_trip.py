"""What stages write, another cut of the model reads back bit for bit."""

import json
import subprocess
import sys

import pytest
import torch

from raypipe.checkpoint import (
    commit,
    latest,
    open_checkpoint,
    step_directory,
    write_shard,
)
from raypipe.errors import CheckpointError


def tensors_of(layers, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    result = {}
    for layer in layers:
        result[f"param/{layer}.qkv.weight"] = torch.randn(4, 3, generator=generator).to(dtype)
        result[f"optim/{layer}.qkv.weight/exp_avg"] = torch.randn(4, 3, generator=generator).to(dtype)
        result[f"optim/{layer}.qkv.weight/step"] = torch.tensor(7.0)
    return result


def save(root, step=50, cuts=((0, 1), (2, 3)), **meta):
    directory = step_directory(root, step)
    shards = [write_shard(directory, f"stage-{i}", tensors_of(layers)) for i, layers in enumerate(cuts)]
    return commit(directory, step, shards, meta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_bits_survive(tmp_path, dtype):
    directory = step_directory(tmp_path, 3)
    tensors = tensors_of([0], dtype)
    commit(directory, 3, [write_shard(directory, "stage-0", tensors)], {})
    back = open_checkpoint(directory).read(tensors)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype
        assert torch.equal(back[key], tensor)


def test_another_plan_reads_across_the_old_cut(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, job="quickstart", hash="abc"))
    assert (checkpoint.step, checkpoint.meta) == (50, {"job": "quickstart", "hash": "abc"})
    wanted = ["param/1.qkv.weight", "param/2.qkv.weight"]
    result = checkpoint.read(wanted)
    assert list(result) == wanted
    assert torch.equal(result[wanted[0]], tensors_of([0, 1])[wanted[0]])
    assert torch.equal(result[wanted[1]], tensors_of([2, 3])[wanted[1]])
    assert len(checkpoint.keys) == 12


def test_views_of_one_buffer_and_tied_tensors_are_written_whole(tmp_path):
    flat = torch.arange(12.0)
    weight = flat[2:8].view(2, 3)
    tensors = {"param/0.a": weight, "param/0.b": weight.T, "param/1.a": flat, "param/2.a": flat}
    commit(tmp_path / "step-1", 1, [write_shard(tmp_path / "step-1", "stage-0", tensors)], {})
    back = open_checkpoint(tmp_path / "step-1").read(tensors)
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)


def test_names_sort_as_steps_do(tmp_path):
    assert step_directory(tmp_path, 50).name == "step-00000050"
    names = [step_directory(tmp_path, step).name for step in (9, 10, 100)]
    assert names == sorted(names)


def test_nothing_partial_is_left_and_writing_again_replaces(tmp_path):
    save(tmp_path)
    directory = save(tmp_path, again=True)
    assert sorted(p.name for p in directory.iterdir()) == [
        "manifest.json",
        "stage-0.safetensors",
        "stage-1.safetensors",
    ]
    assert open_checkpoint(directory).meta == {"again": True}


def test_a_key_is_written_once(tmp_path):
    shards = [write_shard(tmp_path, f"stage-{i}", tensors_of([0])) for i in range(2)]
    with pytest.raises(CheckpointError, match=r"is in stage-0.safetensors and in stage-1.safetensors"):
        commit(tmp_path, 1, shards, {})
    assert not (tmp_path / "manifest.json").exists()


def test_a_shard_must_be_where_the_manifest_is(tmp_path):
    shard = write_shard(tmp_path / "elsewhere", "stage-0", tensors_of([0]))
    with pytest.raises(CheckpointError, match=r"stage-0.safetensors is not there"):
        commit(tmp_path / "here", 1, [shard], {})


def test_a_disk_that_refuses_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="can't be written"):
        write_shard(tmp_path / "file", "stage-0", tensors_of([0]))


def test_an_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(CheckpointError, match=r"qkv.weight"):
        open_checkpoint(save(tmp_path)).read(["param/0.qkv.weigth"])


# What a kill, a full disk or a careless hand leaves behind.


def truncate(directory):
    path = directory / "stage-1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def flip_a_bit(directory):
    path = directory / "stage-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_manifest(change):
    def damage(directory):
        path = directory / "manifest.json"
        body = json.loads(path.read_text())
        body.update(change)
        path.write_text(json.dumps(body))

    return damage


DAMAGE = [
    (lambda d: (d / "stage-0.safetensors").unlink(), "stage-0.safetensors: is missing"),
    (truncate, "is truncated: "),
    (flip_a_bit, "is damaged: its content differs from its digest"),
    (lambda d: (d / "manifest.json").unlink(), "was never finished"),
    (lambda d: (d / "manifest.json").write_text("{"), "manifest.json: is damaged"),
    (lambda d: (d / "manifest.json").write_text("[]"), "is not a raypipe checkpoint's manifest"),
    (edit_manifest({"step": 60}), "is damaged: its content differs from its digest"),
    (edit_manifest({"version": 0}), "has format version 0, an older one than this raypipe's 1"),
    (edit_manifest({"version": 2}), "has format version 2, a newer one than this raypipe's 1"),
    (lambda d: [p.unlink() for p in d.iterdir()], "is not a checkpoint"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damage_is_named_and_an_older_checkpoint_found(tmp_path, damage, words):
    older, newer = save(tmp_path, 40), save(tmp_path, 50)
    damage(newer)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(newer)
    assert caught.value.fix
    path, notices = latest(tmp_path)
    assert path == older
    assert len(notices) == 1
    assert "step-00000050" in notices[0]


def test_without_verification_only_sizes_are_checked(tmp_path):
    directory = save(tmp_path)
    flip_a_bit(directory)
    assert open_checkpoint(directory, verify=False).step == 50
    truncate(directory)
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(directory, verify=False)


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(tmp_path / "file")


def test_latest_is_the_newest_by_number_or_nothing(tmp_path):
    assert latest(tmp_path / "nowhere") == (None, [])
    save(tmp_path, 90)
    newest = save(tmp_path, 123_456_789)
    (tmp_path / "step-notes").mkdir()
    assert latest(tmp_path) == (newest, [])


@pytest.mark.slow
def test_a_full_disk_leaves_an_error_and_no_file(tmp_path):
    """The process may write 1000 bytes a file: what a full disk looks like from inside."""
    script = """
import resource, sys
from pathlib import Path
import torch
from raypipe.checkpoint import write_shard
from raypipe.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_shard(Path(sys.argv[1]), "stage-0", {"param/0.a": torch.zeros(10000)})
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "can't be written" in done.stdout
    assert list(tmp_path.iterdir()) == []
