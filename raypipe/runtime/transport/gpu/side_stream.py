"""The CUDA stream beside the compute stream on which an edge's copies and NCCL calls run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from raypipe.models.host_copies import named_stream
from raypipe.runtime.transport import message_header as wire


class Mark(Protocol):
    """A point in a stream; a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Return whether everything before it is done."""


class Side(Protocol):
    """The stream that the channels for GPU tensors need. Tests replace it by one that does everything at once."""

    device: torch.device

    def after_compute(self) -> AbstractContextManager[None]:
        """Work issued inside runs beside the compute stream, after the work that is queued there now."""

    def independent(self) -> AbstractContextManager[None]:
        """Work issued inside does not wait for the compute stream. Tensors made inside belong to the side stream."""

    def mark(self) -> Mark:
        """A point after everything issued to the side stream so far."""

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        """The side stream reads these tensors of the compute stream; their memory may be reused only after that."""

    def hand_over(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        """Let the compute stream wait for ``mark`` and then use tensors made on the side stream. The host goes on."""


class CopyStream:
    """A CUDA stream of its own on ``device``, by name. The calling thread's current stream is the compute stream."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        # torch's streams do not synchronise with the default stream, so a pending receive never holds up compute.
        self.stream: Any = named_stream(device, name)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """See Side.after_compute."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def independent(self) -> Iterator[None]:
        """See Side.independent."""
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Mark:
        """See Side.mark."""
        mark: Mark = self.stream.record_event()
        return mark

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        """See Side.borrow."""
        for tensor in tensors:
            tensor.record_stream(self.stream)

    def hand_over(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        """See Side.hand_over."""
        compute: Any = torch.cuda.current_stream(self.device)
        compute.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(compute)


def current_gpu() -> torch.device:
    """The GPU that this process has made its current device."""
    return torch.device("cuda", torch.cuda.current_device())


def snapshot(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Dense copies made by the compute stream, so that the caller may overwrite its tensors at once.

    A copy within the device costs microseconds; making compute wait for a transfer to leave would cost the transfer.
    """
    copies = []
    for tensor in tensors:
        block = wire.dense(tensor.detach())
        same = block.data_ptr() == tensor.data_ptr()
        copies.append(block.clone(memory_format=torch.contiguous_format) if same else block)
    return copies
