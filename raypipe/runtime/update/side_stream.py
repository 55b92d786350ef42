"""A second stream of work on one device: a CUDA stream of lower priority, or a thread where kernels run in the call.

Work is queued behind all that the main stream has been given so far, and the main stream waits for it only where it is
told to. On a GPU the host never waits.

Source: Oh et al. 2022 (OOO backprop), sections 4.1 and 6 (a light-weight sub-stream with events between the streams).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from raypipe.models.host_copies import named_stream, runs_behind

Work = Callable[[], None]
MAIN_PRIORITY, SIDE_PRIORITY = -1, 0
"""CUDA's, where smaller is more urgent; the default stream has 0, so a main stream of its own is needed."""


class Done(NamedTuple):
    """The end of work on the second stream."""

    wait: Callable[[], object]
    """Lets the main stream wait for it; raises what the work has raised, where that is known."""
    synchronize: Callable[[], object]
    """Lets the host wait for it."""


class SideStream(Protocol):
    """The second stream of a device."""

    def run(self, work: Work, keep: Sequence[object] = ()) -> Done:
        """Queue work behind what the main stream has been given so far, and behind earlier work of this stream.

        ``keep``: what it reads, which must live until then.
        """

    def close(self) -> None:
        """Let go of everything; work that has not begun is dropped."""


def side_stream(device: torch.device) -> SideStream:
    """Return a second stream of a device."""
    return DeviceStream(device) if runs_behind(device) else ThreadStream()


class ThreadStream:
    """A thread: torch's kernels let go of Python's lock, so those of two threads run at the same time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raypipe-side-stream")

    def run(self, work: Work, keep: Sequence[object] = ()) -> Done:
        """See SideStream.run."""
        done = self._pool.submit(torch.no_grad()(work))
        return Done(done.result, done.result)

    def close(self) -> None:
        """See SideStream.close."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def make_stream(device: torch.device) -> Any:
    """Return a stream of lower priority than the main one."""
    return named_stream(device, "second", SIDE_PRIORITY)


def make_event() -> Any:
    """Return an event that takes no times."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> Any:
    """Return the stream that kernels are being launched on."""
    return torch.cuda.current_stream(device)


def use(stream: Any) -> AbstractContextManager[object]:
    """Launch kernels on a stream inside the block."""
    return torch.cuda.stream(stream)


def prefer_main_stream(device: torch.device) -> None:
    """Compute on a stream that goes before a second one, from now on; does nothing without a GPU.

    It waits for what is queued where the device computed before, such as the start values of parameters.
    """
    if device.type == "cuda":
        main = named_stream(device, "main", MAIN_PRIORITY)
        main.wait_stream(current_stream(device))
        torch.cuda.set_stream(main)


class DeviceStream:
    """A stream of a device that works off what the host has launched.

    What work reads lives until the device has come to its end: torch's allocator would give memory of the main stream
    that the host has let go of to the main stream's next kernel, while the second stream still reads it. Inside a
    capture (``captured``) the host cannot ask how far the device is, and all is kept to the end.
    """

    def __init__(self, device: torch.device, captured: bool = False) -> None:
        self._device, self._stream, self._captured = device, make_stream(device), captured
        self._kept: deque[tuple[Any, Sequence[object]]] = deque()

    def run(self, work: Work, keep: Sequence[object] = ()) -> Done:
        """See SideStream.run."""
        while not self._captured and self._kept and self._kept[0][0].query():
            self._kept.popleft()
        begin, end = make_event(), make_event()
        begin.record(current_stream(self._device))
        self._stream.wait_event(begin)
        with use(self._stream), torch.no_grad():
            work()
        end.record(self._stream)
        self._kept.append((end, keep))
        return Done(lambda: current_stream(self._device).wait_event(end), lambda: end.synchronize())

    def close(self) -> None:
        """See SideStream.close."""
        if self._kept and not self._captured:
            self._kept[-1][0].synchronize()
        self._kept.clear()
