"""A wait on Gloo that times out is told apart from a connection that broke."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Peer, TensorSpec
from raypipe.runtime.transport.framed.gloo import GlooReceiver

LABEL = Label("act", 0, 1, 0, 0)


class NeverCame:
    """Waits as Gloo does: whole milliseconds, then the same RuntimeError as for everything else."""

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(timeout // timedelta(milliseconds=1) / 1000)
        raise RuntimeError("Timed out waiting for recv operation to complete")


class Broke:
    def wait(self, timeout: timedelta) -> bool:
        raise RuntimeError("Connection closed by peer")


def receiver(work: object, monkeypatch: pytest.MonkeyPatch) -> GlooReceiver:
    monkeypatch.setattr(dist, "irecv", lambda *args, **options: work)
    made = GlooReceiver(Peer(0, "n0", "cpu", "stage 0"), group=None)  # type: ignore[arg-type]
    made.post([Expected(LABEL, (TensorSpec((4,), torch.float32),))])
    return made


def test_a_wait_of_a_fraction_of_a_millisecond_more_is_still_a_timeout(monkeypatch) -> None:
    with pytest.raises(TransportError, match=r"did not come within 0\.0105 s"):
        receiver(NeverCame(), monkeypatch).recv(LABEL, 0.0105)


def test_an_end_before_the_deadline_is_a_lost_connection(monkeypatch) -> None:
    with pytest.raises(TransportError, match="connection lost"):
        receiver(Broke(), monkeypatch).recv(LABEL, 30.0)
