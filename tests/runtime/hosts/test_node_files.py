"""Files for nodes that do not share the run's directory arrive whole and unchanged, or it is said."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from raypipe.checkpoint import Snapshot, commit, open_checkpoint, write_shard
from raypipe.errors import CheckpointError, ClusterError
from raypipe.runtime.hosts import node_files
from raypipe.runtime.hosts.node_files import SentShard
from raypipe.runtime.state.shard_writer import put_snapshot


class Calls(list):
    """A node's worker: it runs what it is asked to at once, and notes it."""

    @property
    def on_node(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self.run)

    def run(self, name: str, *args: object) -> object:
        self.append(name)
        return getattr(node_files, name)(*args)


@pytest.fixture
def node(tmp_path, monkeypatch) -> Calls:
    """One node with a temporary folder of its own, and pieces of a few bytes."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(node_files.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(node_files, "CHUNK_BYTES", 7)
    monkeypatch.setattr(node_files, "own_address", lambda: "10.0.0.2")
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value: value)
    return Calls()


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def send(node: Calls, folder: Path) -> Path:
    return node_files.send_folder([node], folder, "run", "data")[0]


def test_a_folder_arrives_and_is_sent_again_only_if_it_changed(node, tmp_path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "corpus.json").write_bytes(b"{}")
    (data / "deep" / "tokens").write_bytes(os.urandom(100))
    (data / "empty").touch()
    there = send(node, data)
    assert files_in(there) == files_in(data)
    assert there.parent.stat().st_mode & 0o077 == 0  # nobody else's to read
    node.clear()
    assert send(node, data) == there
    assert "take_chunk" not in node
    (data / "deep" / "tokens").write_bytes(os.urandom(100))
    (data / "empty").unlink()
    assert files_in(send(node, data)) == files_in(data)
    node_files.clear_files("run")
    assert not there.parent.exists()


def test_a_file_that_arrives_otherwise_is_said(node, tmp_path, monkeypatch) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokens").write_bytes(b"0123456789")
    monkeypatch.setattr(node_files, "take_chunk", lambda *args: None)
    with pytest.raises(ClusterError, match="did not take tokens of data as the driver sent it"):
        send(node, data)


def test_anothers_folder_is_refused(node, tmp_path, monkeypatch) -> None:
    node_files.node_folder("run")
    monkeypatch.setattr(node_files.os, "getuid", lambda: os.geteuid() + 1)
    mine = node_files.node_folder  # the name has the user's number in it: take the one that is there
    with pytest.raises(ClusterError, match="belongs to another user"):
        mine("run")


def put_shard(name: str, tensors: dict[str, torch.Tensor]) -> SentShard:
    snapshot = Snapshot()
    snapshot.take(tensors)
    return put_snapshot(name, snapshot)


def test_shards_make_the_checkpoint_that_they_would_make_at_home(node, tmp_path) -> None:
    tensors = [{"param/0.a": torch.randn(5)}, {"param/1.b": torch.randn(3, 2, dtype=torch.float64)}]
    own = tmp_path / "own"
    own.mkdir()
    shards = [write_shard(own, "rank-0", tensors[0]), put_shard("rank-1", tensors[1])]
    assert len(shards[1].chunks) > 1
    commit(own, 3, [node_files.received(own, shard) for shard in shards], {})
    checkpoint = open_checkpoint(own)
    for each in tensors:
        for key, value in checkpoint.read(each).items():
            assert torch.equal(value, each[key])


def test_a_damaged_shard_is_no_checkpoint(node, tmp_path) -> None:
    good = put_shard("rank-0", {"param/0.a": torch.ones(4)})
    with pytest.raises(CheckpointError, match="is not what its worker sent"):
        node_files.received(tmp_path, SentShard(good.info, (b"x", *good.chunks[1:])))
    assert not list(tmp_path.glob("rank-*"))
