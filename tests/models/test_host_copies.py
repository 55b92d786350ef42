"""Streams of a GPU by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raypipe.models import host_copies
from raypipe.models.host_copies import STREAMS, named_stream
from raypipe.runtime.transport.gpu.side_stream import CopyStream
from raypipe.runtime.update import side_stream

GPU = torch.device("cuda", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The priorities of the streams that are made."""
    result: list[int] = []

    def make(device: torch.device, priority: int) -> object:
        result.append(priority)
        return SimpleNamespace(number=len(result))

    monkeypatch.setattr(host_copies, "_streams", {})
    monkeypatch.setattr(host_copies, "make_stream", make)
    return result


def test_edges_that_are_opened_again_and_again_keep_their_streams(made: list[int]) -> None:
    first = [CopyStream(GPU, f"to {peer}").stream for peer in range(4)]
    for _ in range(20):
        assert [CopyStream(GPU, f"to {peer}").stream for peer in range(4)] == first
    assert len(made) == 4


def test_no_more_streams_than_the_hardware_has_and_the_first_names_share_none(made: list[int]) -> None:
    second = named_stream(GPU, "second")
    edges = [named_stream(GPU, f"to {peer}") for peer in range(200)]
    assert len(made) == STREAMS
    assert second not in edges
    assert max(edges.count(stream) for stream in edges) == -(-(200 - STREAMS + 1) // (STREAMS // 2)) + 1
    assert named_stream(GPU, "main", -1) not in edges


def test_the_main_stream_waits_for_what_was_queued_before(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    main = SimpleNamespace(wait_stream=lambda stream: said.append(("waits for", stream)))
    monkeypatch.setattr(host_copies, "_streams", {})
    monkeypatch.setattr(host_copies, "make_stream", lambda device, priority: main)
    monkeypatch.setattr(side_stream, "current_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: said.append(("current", stream)))
    side_stream.prefer_main_stream(GPU)
    assert said == [("waits for", "default"), ("current", main)]
