"""A write goes on beside training, of the moment at which it began; its end is told once, as is its error."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raypipe.checkpoint import ShardInfo, Snapshot, write_snapshot
from raypipe.errors import CheckpointError, TransportError
from raypipe.runtime.state.shard_writer import ShardWriter


class Gate:
    """A storage that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def write(self, folder: Path, name: str, snapshot: Snapshot) -> ShardInfo:
        assert self.opened.wait(10.0)
        return write_snapshot(folder, name, snapshot)


def test_training_goes_on_while_its_past_is_written(tmp_path: Path) -> None:
    gate = Gate()
    writer = ShardWriter()
    weight = torch.arange(1000.0)
    assert writer.ended() is None
    writer.begin(3, 7, {"param/0.w": weight}, partial(gate.write, tmp_path))
    weight.fill_(-1.0)
    assert writer.ended() is None
    assert not list(tmp_path.glob("*.safetensors"))
    gate.opened.set()
    written = writer.wait()
    assert written is not None
    assert (written.rank, written.number) == (3, 7)
    assert isinstance(written.shard, ShardInfo)
    assert torch.equal(load_file(tmp_path / written.shard.file)["param/0.w"], torch.arange(1000.0))
    assert (writer.ended(), writer.wait()) == (None, None)  # it has been told


def test_whoever_has_nothing_to_write_says_so_at_once(tmp_path: Path) -> None:
    writer = ShardWriter()
    writer.begin(0, 1, {}, partial(write_snapshot, tmp_path))
    written = writer.ended()
    assert written is not None
    assert (written.shard, list(tmp_path.iterdir())) == (None, [])


def test_a_full_disk_is_told_once_and_by_whoever_asks_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    writer = ShardWriter()
    writer.begin(0, 1, {"param/0.w": torch.ones(2)}, partial(write_snapshot, tmp_path / "file"))
    with pytest.raises(CheckpointError, match="can't be written"):
        writer.wait()
    assert writer.ended() is None
    writer.begin(0, 2, {"param/0.w": torch.ones(2)}, partial(write_snapshot, tmp_path / "file"))
    writer.drop()
    assert writer.ended() is None


def test_an_update_may_wait_for_a_write_whose_end_is_told_later(tmp_path: Path) -> None:
    gate, writer, lost = Gate(), ShardWriter(), Future[str]()
    writer.arrive(lost)
    writer.begin(3, 7, {"param/0.w": torch.arange(10.0)}, partial(gate.write, tmp_path))
    assert writer.ended() is None
    threading.Timer(0.05, gate.opened.set).start()
    writer.arrive(lost)
    assert gate.opened.is_set()
    written = writer.ended()
    assert written is not None
    assert written.number == 7


def test_it_does_not_wait_for_a_host_that_is_lost(tmp_path: Path) -> None:
    gate, writer, lost = Gate(), ShardWriter(), Future[str]()
    writer.begin(3, 7, {"param/0.w": torch.arange(10.0)}, partial(gate.write, tmp_path))
    threading.Timer(0.05, lost.set_result, ["10.0.0.2"]).start()
    with pytest.raises(TransportError, match=r"10\.0\.0\.2"):
        writer.arrive(lost)
    gate.opened.set()
    assert writer.wait() is not None
