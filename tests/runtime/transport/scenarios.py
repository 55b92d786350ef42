"""What every kind of channel must do, as two processes see it. Not a test file: test_channels.py runs it.

``python -m tests.runtime.transport.scenarios KIND RANK PORT RUN_ID all`` runs all scenarios as one rank and prints
{scenario: "ok" or traceback}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Receiver, Sender, TensorSpec
from raypipe.runtime.transport.registry import open_channels
from tests.runtime.transport.kinds import PEERS


class Ends:
    """A fresh pair of channels, one each way, as seen from one rank."""

    def __init__(self, kind: str, rank: int, run_id: str) -> None:
        senders, receivers = open_channels(PEERS[rank], PEERS, [(0, 1), (1, 0)], kind, run_id, timeout_s=20)
        self.rank = rank
        self.out: Sender = senders[1 - rank]
        self.into: Receiver = receivers[1 - rank]

    def label(self, mb: int, sender: int, step: int = 0) -> Label:
        return Label("act" if sender == 0 else "grad", sender, 1 - sender, mb, step)


def expect(label: Label, *tensors: torch.Tensor) -> Expected:
    return Expected(label, tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors))


def refused(do: Callable[[], object], *words: str) -> str:
    with pytest.raises(TransportError) as caught:
        do()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    return str(caught.value)


def zoo() -> list[list[torch.Tensor]]:
    """Messages of every sort of tensor; the same on both ranks."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    return [
        [x],
        [x.to(torch.bfloat16), x.to(torch.float64), x > 0, torch.arange(7)],
        [x.t(), x[::2, 1::3], x[0].expand(4, 8)],
        [torch.tensor(2.5), torch.zeros(0, 3), torch.tensor(True)],
        [],
        [torch.randn(3, 3, dtype=torch.complex64).conj(), torch.randn(4, dtype=torch.complex64).conj().imag],
        [torch.randn(100_000), torch.randn(3, requires_grad=True), torch.arange(100_001, dtype=torch.uint8)],
        [
            torch.randn(3_000_000),
            torch.arange(9, dtype=torch.int16),
            torch.randn(700_000, dtype=torch.float16),
            torch.tensor([1], dtype=torch.int8),
        ],
    ]


def values(ends: Ends) -> None:
    messages = zoo()
    ends.into.post([expect(ends.label(i, 1 - ends.rank), *m) for i, m in enumerate(messages)])
    for i, message in enumerate(messages):
        ends.out.send(ends.label(i, ends.rank), message)
    for i, message in enumerate(messages):
        got = ends.into.recv(ends.label(i, 1 - ends.rank), 20)
        assert len(got) == len(message)
        for mine, theirs in zip(message, got, strict=True):
            assert theirs.dtype == mine.dtype
            assert theirs.shape == mine.shape
            assert torch.equal(theirs, mine)
            assert theirs.is_contiguous()
            assert not theirs.requires_grad
    ends.out.flush(20)


def snapshot(ends: Ends) -> None:
    """The sender may overwrite at once, the receiver may keep and change what it got."""
    for size in (4, 40_000, 400_000):
        labels = [ends.label(i, 1 - ends.rank, size) for i in range(12)]
        x = torch.zeros(size)
        ends.into.post([expect(label, x) for label in labels])
        for i in range(12):
            x.fill_(i)
            ends.out.send(ends.label(i, ends.rank, size), [x])
        x.fill_(-1)
        got = [ends.into.recv(label, 20)[0] for label in labels]
        for i, tensor in enumerate(got):
            assert bool((tensor == i).all()), f"size {size}, message {i}"
            tensor.fill_(-2)
        ends.out.flush(20)  # what a full buffer held back is ours to push


def any_order(ends: Ends) -> None:
    labels = [ends.label(i, 1 - ends.rank) for i in range(10)]
    ends.into.post([expect(label, torch.zeros(3)) for label in labels[:4]])
    ends.into.post([expect(label, torch.zeros(3)) for label in labels[4:]])
    for i in range(10):
        ends.out.send(ends.label(i, ends.rank), [torch.full((3,), float(i))])
    for i in (9, 0, 5, 4, 8, 7, 1, 2, 3, 6):
        assert ends.into.recv(labels[i], 20)[0].tolist() == [float(i)] * 3


def both_ways(ends: Ends) -> None:
    """Both send everything before either receives anything."""
    x = torch.arange(500_000, dtype=torch.float32)
    labels = [ends.label(i, 1 - ends.rank) for i in range(24)]
    ends.into.post([expect(label, x) for label in labels])
    for i in range(24):
        ends.out.send(ends.label(i, ends.rank), [x + i])
    for i, label in enumerate(labels):
        assert torch.equal(ends.into.recv(label, 20)[0], x + i)
    ends.out.flush(20)


def ping_pong(ends: Ends) -> None:
    for step in range(200):
        ends.into.post([expect(ends.label(0, 1 - ends.rank, step), torch.zeros(1000))])
        if ends.rank == 0:
            ends.out.send(ends.label(0, 0, step), [torch.full((1000,), float(step))])
        got = ends.into.recv(ends.label(0, 1 - ends.rank, step), 20)[0]
        assert got[999].item() == step
        if ends.rank == 1:
            ends.out.send(ends.label(0, 1, step), [got])


def _wrong(ends: Ends, sent: Label, tensor: torch.Tensor, *words: str) -> None:
    wanted = expect(ends.label(3, 0, step=7), torch.zeros(4, 2))
    if ends.rank == 0:
        ends.out.send(sent, [tensor])
        return
    ends.into.post([wanted])
    refused(lambda: ends.into.recv(wanted.label, 20), "stage 0 (rank 0)", str(wanted.label), "float32 4x2", *words)
    refused(lambda: ends.into.recv(wanted.label, 20), *words)  # and it stays refused


def wrong_label(ends: Ends) -> None:
    _wrong(ends, ends.label(4, 0, step=7), torch.zeros(4, 2), "micro-batch 4")


def wrong_shape(ends: Ends) -> None:
    _wrong(ends, ends.label(3, 0, step=7), torch.zeros(2, 4), "float32 2x4")


def wrong_dtype(ends: Ends) -> None:
    _wrong(ends, ends.label(3, 0, step=7), torch.zeros(4, 2, dtype=torch.int32), "int32 4x2")


def much_too_large(ends: Ends) -> None:
    _wrong(ends, ends.label(3, 0, step=7), torch.zeros(9000, 1000), "float32 9000x1000")


def timeout(ends: Ends) -> None:
    if ends.rank == 0:
        label = ends.label(5, 1, step=9)
        ends.into.post([expect(ends.label(4, 1, step=9), torch.zeros(1)), expect(label, torch.zeros(1))])
        start = time.monotonic()
        refused(
            lambda: ends.into.recv(label, 0.3),
            "stage 1 (rank 1)",
            "gradient of micro-batch 5, stage 1 -> 0, step 9",
            "0.3 s",
            "first in line is gradient of micro-batch 4",
        )
        assert 0.25 < time.monotonic() - start < 3


def never_announced(ends: Ends) -> None:
    refused(lambda: ends.into.recv(ends.label(0, 1 - ends.rank), 20), "never announced")
    ends.into.post([expect(ends.label(0, 1 - ends.rank))])
    refused(lambda: ends.into.post([expect(ends.label(0, 1 - ends.rank))]), "announced twice")


class Held:
    """Another channel of this device with a copy under way: after three looks it sends what the peer waits for."""

    def __init__(self, ends: Ends) -> None:
        self.ends, self.looks, self.pending = ends, 0, True

    def progress(self) -> None:
        self.looks += 1
        if self.looks == 3:
            self.ends.out.send(self.ends.label(0, 0), [torch.ones(2)])
            self.pending = False


def pushes_while_it_waits(ends: Ends) -> None:
    ends.into.post([expect(ends.label(0, 1 - ends.rank), torch.ones(2))])
    if ends.rank == 0:
        ends.into._progress.add(Held(ends))  # type: ignore[attr-defined]
    got = ends.into.recv(ends.label(0, 1 - ends.rank), 5)
    assert got[0].tolist() == [1, 1]
    if ends.rank == 1:
        ends.out.send(ends.label(0, 1), got)


def flushing_what_nobody_takes(ends: Ends) -> None:
    """Where a send lasts until its receive (Gloo), flush says who does not receive; where it does not, it has left."""
    if ends.rank == 0:
        ends.out.send(ends.label(6, 0), [torch.ones(5)])
        late = ""
        try:
            ends.out.flush(0.05)
        except TransportError as error:
            late = str(error)
        assert not late or all(word in late for word in ("stage 1 (rank 1)", "micro-batch 6", "0.05 s")), late
    dist.barrier()
    if ends.rank == 1:
        ends.into.post([expect(ends.label(6, 0), torch.ones(5))])
        assert ends.into.recv(ends.label(6, 0), 20)[0].tolist() == [1] * 5
    else:
        ends.out.flush(20)


def closed(ends: Ends) -> None:
    ends.out.close()
    ends.out.close()
    refused(lambda: ends.out.send(ends.label(0, ends.rank), [torch.zeros(1)]), "closed")
    ends.into.close()
    ends.into.close()


# What breaks a channel comes last: Ray's Gloo groups share the world's messages, so a receive that was given up there
# would take the next channel's message.
ALL = [values, snapshot, any_order, both_ways, ping_pong, pushes_while_it_waits, flushing_what_nobody_takes]
ALL += [wrong_label, wrong_shape, wrong_dtype, much_too_large, timeout, never_announced, closed]
NAMES = [scenario.__name__ for scenario in ALL]


def run_all(kind: str, rank: int, run_id: str) -> dict[str, str]:
    """Run the scenarios in order, each on fresh channels, both ranks in step."""
    torch.set_num_threads(1)
    outcomes = {}
    for number, scenario in enumerate(ALL):
        ends = Ends(kind, rank, f"{run_id}.{number}")
        try:
            scenario(ends)
            outcomes[scenario.__name__] = "ok"
        except Exception:
            outcomes[scenario.__name__] = traceback.format_exc()
        dist.barrier()
        ends.out.close()
        ends.into.close()
    return outcomes


def join_world(rank: int, store: str) -> None:
    """Join two ranks by a file: a port that is free now may be taken before both have imported torch."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def dies(kind: str, rank: int, run_id: str) -> dict[str, str]:
    """Rank 1 is killed while rank 0 waits for it, and then while it sends to it."""
    ends = Ends(kind, rank, run_id)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    label = ends.label(2, 1)
    ends.into.post([expect(label, torch.zeros(1))])
    start = time.monotonic()
    refused(lambda: ends.into.recv(label, 20), "stage 1 (rank 1)", "connection lost", "micro-batch 2")
    assert time.monotonic() - start < 5

    def send_until_noticed() -> None:
        for mb in range(100):
            ends.out.send(ends.label(mb, 0), [torch.zeros(100_000)])
            time.sleep(0.01)

    refused(send_until_noticed, "stage 1 (rank 1)", "connection lost")
    return {"dies": "ok"}


def dies_opening(kind: str, rank: int, run_id: str) -> dict[str, str]:
    """Rank 1 is killed before it opens its ends of the channels."""
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    refused(lambda: open_channels(PEERS[0], PEERS, [(0, 1), (1, 0)], kind, run_id, timeout_s=2))
    assert time.monotonic() - start < 10
    return {"dies_opening": "ok"}


DEATHS = {"dies": dies, "dies_opening": dies_opening}


if __name__ == "__main__":
    kind, rank, store, run_id, what = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
    join_world(rank, store)
    print(json.dumps(DEATHS.get(what, run_all)(kind, rank, run_id)), flush=True)
    os._exit(0)  # threads that wait in a closed channel must not hold up the end
