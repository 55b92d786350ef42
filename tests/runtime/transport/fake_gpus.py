"""Fake GPUs in one process: hardware queues that block, and links on which a send waits for its receive, as in NCCL."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from raypipe.runtime.transport.gpu.side_stream import Mark

POLL_S = 0.005


class StoppedError(Exception):
    """The test is over; what still waits gives up."""


class Gpu:
    """Work is issued to streams, which share hardware queues in turn; each queue does one thing after another."""

    def __init__(self, queues: int) -> None:
        self.stop = threading.Event()
        self._queues: list[queue.SimpleQueue[Callable[[], None]]] = [queue.SimpleQueue() for _ in range(queues)]
        self._streams = 0
        self.failed: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(q,), daemon=True) for q in self._queues]
        for thread in self._threads:
            thread.start()
        self.compute = self.stream()

    def stream(self) -> queue.SimpleQueue[Callable[[], None]]:
        """Make a stream: the queue that it feeds."""
        self._streams += 1
        return self._queues[(self._streams - 1) % len(self._queues)]

    def _run(self, work: queue.SimpleQueue[Callable[[], None]]) -> None:
        while not self.stop.is_set():
            try:
                one = work.get(timeout=POLL_S)
            except queue.Empty:
                continue
            try:
                one()
            except StoppedError:
                return
            except BaseException as error:  # an assertion of a kernel
                self.failed.append(error)

    def wait(self, event: threading.Event) -> None:
        """Wait on the GPU."""
        while not event.wait(POLL_S):
            if self.stop.is_set():
                raise StoppedError

    def take(self, from_: queue.SimpleQueue[torch.Tensor]) -> torch.Tensor:
        """Wait on the GPU for a peer."""
        while True:
            try:
                return from_.get(timeout=POLL_S)
            except queue.Empty:
                if self.stop.is_set():
                    raise StoppedError from None

    def end(self) -> None:
        """Stop the queues, done or not."""
        self.stop.set()
        for thread in self._threads:
            thread.join()


class Event(threading.Event):
    """A mark of a stream."""

    def query(self) -> bool:
        return self.is_set()


class FakeSide:
    """``SideStream`` of a fake GPU; the channel's NCCL calls run on it as well."""

    device = torch.device("cpu")

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream = gpu, gpu.stream()

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        done = Event()
        self.gpu.compute.put(done.set)
        self.stream.put(lambda: self.gpu.wait(done))
        yield

    @contextmanager
    def independent(self) -> Iterator[None]:
        yield

    def mark(self) -> Mark:
        done = Event()
        self.stream.put(done.set)
        return done

    def borrow(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def hand_over(self, mark: Mark, tensors: Iterable[torch.Tensor]) -> None:
        assert isinstance(mark, Event)
        self.gpu.compute.put(lambda: self.gpu.wait(mark))


class Wire:
    """What the two ends of a link share."""

    def __init__(self) -> None:
        self.there: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.taken: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()


class BlockingLink:
    """One end of a link. A send ends when its receive has run, and neither lets its queue go on before."""

    def __init__(self, wire: Wire, side: FakeSide) -> None:
        self.wire, self.side = wire, side

    def send(self, tensor: torch.Tensor) -> None:
        def run() -> None:
            self.wire.there.put(tensor.clone())
            self.side.gpu.take(self.wire.taken)

        self.side.stream.put(run)

    def recv(self, tensor: torch.Tensor) -> None:
        def run() -> None:
            sent = self.side.gpu.take(self.wire.there)
            assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
            tensor.copy_(sent)
            self.wire.taken.put(sent)

        self.side.stream.put(run)

    def close(self) -> None:
        pass
