"""Which channel serves which edge."""

from __future__ import annotations

from typing import get_args

import pytest

from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.inbox import who
from raypipe.runtime.transport.registry import TRANSPORTS, choose

CPU, SAME, FAR = Peer(0, "a", "cpu", "stage 0"), Peer(1, "a", "cpu", "stage 1"), Peer(2, "b", "cpu")
GPU, TWIN, OTHER, FAR_GPU = (
    Peer(3, "a", "cuda:0"),
    Peer(4, "a", "cuda:0"),
    Peer(5, "a", "cuda:1"),
    Peer(6, "b", "cuda:2"),
)


@pytest.mark.parametrize(
    ("src", "dst", "nccl", "kind"),
    [
        (CPU, SAME, True, "shm"),
        (CPU, FAR, True, "gloo"),
        (GPU, OTHER, True, "nccl"),
        (GPU, FAR_GPU, True, "nccl"),
        (GPU, OTHER, False, "pinned"),
        (GPU, TWIN, True, "pinned"),
        (GPU, CPU, True, "pinned"),
        (FAR, GPU, True, "pinned"),
    ],
)
def test_auto(src: Peer, dst: Peer, nccl: bool, kind: str) -> None:
    assert choose(src, dst, "auto", lacking=() if nccl else ("nccl",)) == kind
    assert choose(dst, src, "auto", lacking=() if nccl else ("nccl",)) == kind


@pytest.mark.parametrize(
    ("src", "dst", "requested"),
    [
        (CPU, SAME, "shm"),
        (CPU, SAME, "gloo"),
        (CPU, FAR, "gloo"),
        (CPU, FAR, "ray-collective"),
        (GPU, OTHER, "nccl"),
        (GPU, OTHER, "pinned"),
        (GPU, CPU, "pinned"),
        (GPU, FAR_GPU, "ray-collective"),
    ],
)
def test_a_request_that_can_be_met_is_met(src: Peer, dst: Peer, requested: str) -> None:
    assert choose(src, dst, requested) == requested


@pytest.mark.parametrize(
    ("src", "dst", "requested", "why"),
    [
        (CPU, FAR, "shm", "different nodes(.|\n)*takes gloo here"),
        (GPU, TWIN, "shm", "a GPU is involved(.|\n)*takes pinned here"),
        (GPU, OTHER, "gloo", "a GPU is involved(.|\n)*takes nccl here"),
        (CPU, SAME, "nccl", r"stage 0 \(rank 0\) to stage 1 \(rank 1\): NCCL needs a GPU(.|\n)*takes shm here"),
        (GPU, TWIN, "nccl", "two stages on one GPU(.|\n)*takes pinned here"),
        (CPU, SAME, "pinned", "there is none at either end"),
        (GPU, TWIN, "ray-collective", "two stages on one GPU"),
        (GPU, CPU, "ray-collective", "a GPU and a CPU device"),
        (CPU, SAME, "gluu", 'no transport "gluu"(.|\n)*did you mean "gloo"'),
    ],
)
def test_a_request_that_cannot_be_met_says_why(src: Peer, dst: Peer, requested: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        choose(src, dst, requested)


def test_nccl_without_nccl() -> None:
    with pytest.raises(SpecError, match=r"not every device of the run has .*NCCL(.|\n)*takes pinned here"):
        choose(GPU, OTHER, "nccl", lacking=["nccl"])


@pytest.mark.parametrize("requested", TRANSPORTS)
def test_every_pair_of_devices_is_served_or_refused_with_what_auto_takes(requested: str) -> None:
    pairs = [(src, dst) for src in (CPU, SAME, FAR, GPU, TWIN, OTHER, FAR_GPU) for dst in (CPU, GPU) if src != dst]
    refusals = {(src, dst): TRANSPORTS[requested].refusal(src, dst) for src, dst in pairs}
    assert "" in refusals.values()
    for (src, dst), why in refusals.items():
        if why:
            with pytest.raises(SpecError, match=f"takes {choose(src, dst)} here") as caught:
                choose(src, dst, requested)
            assert caught.value.why.endswith(f"from {who(src)} to {who(dst)}: {why}")
        else:
            assert choose(src, dst, requested) == requested


def test_a_job_can_ask_for_every_transport() -> None:
    assert get_args(ParallelSpec.model_fields["transport"].annotation) == ("auto", *TRANSPORTS)
