"""Ray's NCCL groups: what we do to them, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.util import collective

from raypipe.errors import TransportError
from raypipe.runtime.transport.framed.ray_collective import RayLink

CUDA = torch.device("cuda", 0)


class External:
    """cupy.cuda.ExternalStream: knows its pointer and can be the current stream."""

    current: list[int]

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __enter__(self) -> None:
        External.current.append(self.pointer)

    def __exit__(self, *error: object) -> None:
        External.current.pop()


@pytest.fixture
def ray_nccl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for cupy and for Ray's group, and records the calls."""
    seen = SimpleNamespace(joined=[], moved=[], left=[], group=SimpleNamespace(_dev_streams_map={"0_0:1_0": ["own"]}))
    External.current = [0]
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(ExternalStream=External)))
    monkeypatch.setattr(collective, "init_collective_group", lambda *a, **k: seen.joined.append((*a, k["group_name"])))
    monkeypatch.setattr(collective, "get_group_handle", lambda name: seen.group)
    for way in ("send", "recv"):
        monkeypatch.setattr(
            collective, way, lambda t, peer, name, way=way: seen.moved.append((way, peer, name, External.current[-1]))
        )
    monkeypatch.setattr(collective, "destroy_collective_group", seen.left.append)
    return seen


def test_it_runs_on_our_stream_once_adopted(ray_nccl: SimpleNamespace) -> None:
    link = RayLink("edge", sends=True, device=CUDA)
    assert ray_nccl.joined == [(2, 0, "edge")]
    link.send(torch.ones(1))
    stream: Any = SimpleNamespace(cuda_stream=77)
    link.adopt(stream)
    link.send(torch.ones(1))
    (streams,) = ray_nccl.group._dev_streams_map.values()
    assert [s.pointer for s in streams] == [77]
    assert ray_nccl.moved == [("send", 1, "edge", 0), ("send", 1, "edge", 77)]
    link.close()
    assert ray_nccl.left == ["edge"]


def test_the_receiving_end_is_the_other_rank(ray_nccl: SimpleNamespace) -> None:
    link = RayLink("edge", sends=False, device=CUDA)
    link.recv(torch.ones(1))
    assert ray_nccl.joined == [(2, 1, "edge")]
    assert ray_nccl.moved == [("recv", 0, "edge", 0)]


def test_a_ray_with_other_insides_is_refused(ray_nccl: SimpleNamespace) -> None:
    link = RayLink("edge", sends=True, device=CUDA)
    stream: Any = SimpleNamespace(cuda_stream=77)
    for insides in (SimpleNamespace(), SimpleNamespace(_dev_streams_map={})):
        ray_nccl.group = insides
        with pytest.raises(TransportError, match="keeps its streams elsewhere"):
            link.adopt(stream)


def test_an_actor_with_several_gpus_is_refused(ray_nccl: SimpleNamespace) -> None:
    with pytest.raises(TransportError, match="give each actor one GPU"):
        RayLink("edge", sends=True, device=torch.device("cuda", 1))
    assert not ray_nccl.joined


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "gpu"), ("12.8", "gpu12")])
def test_without_cupy_the_error_names_the_extra_for_torchs_cuda(cuda, extra, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(TransportError, match=rf"raypipe\[{extra}\]"):
        RayLink("edge", sends=True, device=CUDA)
