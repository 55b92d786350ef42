"""A new transport is one file and one row of the registry: this file is one, and has the properties of all others."""

from __future__ import annotations

import queue
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from torch import Tensor

from raypipe.errors import SpecError, TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Expected, Label, Peer
from raypipe.runtime.transport.inbox import Inbox
from raypipe.runtime.transport.registry import TRANSPORTS, choose
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport
from tests.runtime.transport import scenarios
from tests.runtime.transport.kinds import PEERS

Queue = queue.SimpleQueue[tuple[bytes, list[Tensor]]]


class InProcess(Transport):
    """Tensors between two devices of one process, by a queue for each edge of a run."""

    queues: ClassVar[defaultdict[tuple[str, Edge], Queue]] = defaultdict(queue.SimpleQueue)

    def refusal(self, src: Peer, dst: Peer) -> str:
        return "it has threads of one node alone" if src.node != dst.node else ""

    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        for peer in opening.destinations(edges):
            ends.out[peer.rank] = QueueSender(self.queues[opening.run_id, (opening.me.rank, peer.rank)])
        for peer in opening.sources(edges):
            ends.into[peer.rank] = QueueReceiver(peer, self.queues[opening.run_id, (peer.rank, opening.me.rank)])


class QueueSender:
    pending = False

    def __init__(self, into: Queue) -> None:
        self._into: Queue | None = into

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        if self._into is None:
            raise TransportError("queue", "the channel is closed", "open it again")
        blocks = [wire.dense(t.detach()).clone() for t in tensors]
        self._into.put((wire.pack_tensors(label, blocks), blocks))

    def progress(self) -> None:
        pass

    def flush(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self._into = None


class QueueReceiver:
    def __init__(self, peer: Peer, source: Queue) -> None:
        self.peer, self._source, self._inbox = peer, source, Inbox(peer)

    def post(self, expected: Sequence[Expected]) -> None:
        self._inbox.post(expected)

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        deadline = time.monotonic() + timeout_s
        while (result := self._inbox.take(label)) is None:
            try:
                head, tensors = self._source.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._inbox.late(label, timeout_s) from None
            self._inbox.keep(self._inbox.accept(head).label, tensors)
        return result

    def close(self) -> None:
        pass


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row. Both ranks are threads of this process, so messages are drawn once for both."""
    monkeypatch.setitem(TRANSPORTS, "in-process", InProcess())
    messages = scenarios.zoo()
    monkeypatch.setattr(scenarios, "zoo", lambda: messages)


def test_a_request_finds_it_and_errors_name_it(added: None) -> None:
    far = Peer(2, "elsewhere", "cpu", "stage 2")
    assert choose(*PEERS, "in-process") == "in-process"
    assert choose(*PEERS) == "shm"  # preferred, as it comes first
    with pytest.raises(SpecError, match=r"in-process can't serve the edge .* to stage 2 .*threads of one node alone"):
        choose(PEERS[0], far, "in-process")
    with pytest.raises(SpecError, match='did you mean "in-process"'):
        choose(*PEERS, "in-proces")


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.values, scenarios.snapshot, scenarios.any_order, scenarios.both_ways, scenarios.ping_pong,
        scenarios.wrong_label, scenarios.wrong_shape, scenarios.wrong_dtype, scenarios.timeout,
        scenarios.never_announced, scenarios.closed,
    ],
)  # fmt: skip
def test_it_has_the_properties_of_all_others(scenario: Callable[[scenarios.Ends], None], added: None) -> None:
    run_id = uuid.uuid4().hex[:8]

    def rank(number: int) -> None:
        scenario(scenarios.Ends("in-process", number, run_id))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, (0, 1)))
