"""Work of a device captured once and replayed: CUDA graphs, behind the little that raypipe needs of them.

A graph replays kernels on the very memory that they had when they were captured. So what a replay is to read has to be
copied into the tensors that the capture has read, its results are in the tensors that the capture returned until the
next replay, and numbers of the host that the capture has seen stay what they were. Capturing runs nothing.

A graph's memory comes from a pool. Graphs that share one have to be replayed in the order in which they were captured,
round and round, one at a time: what nobody referred to any more when a graph was captured has become that graph's, for
results too, and an earlier graph still writes there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from raypipe.errors import SpecError
from raypipe.models.host_copies import named_stream
from raypipe.runtime.update.side_stream import MAIN_PRIORITY, DeviceStream, SideStream

Made = TypeVar("Made")


class GraphError(Exception):
    """Some work cannot be captured; its cause says why. Nothing has run."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue the work again, behind what the current stream has been given so far."""


class DeviceGraphs(Protocol):
    """Captures graphs on one device."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run work as it will be captured, so that kernels are loaded and chosen; its results are dropped."""

    def new_pool(self) -> Any:
        """Return a pool of memory."""

    def capture(self, work: Callable[[], Made], pool: Any) -> tuple[Graph, Made]:
        """Capture work; return the graph, and the results, which have values once it was replayed.

        Raises:
            CaptureError: it reads a value on the host, or does something else that cannot be captured.
        """

    def side_stream(self) -> SideStream:
        """Return a second stream for one capture; the main stream has waited for all of its work at the end."""


def capture_stream(device: torch.device) -> Any:
    """Return the stream of a GPU on which work is captured."""
    return named_stream(device, "captures", MAIN_PRIORITY)


class CudaGraphs:
    """CUDA graphs of a GPU.

    Other threads may use the GPU meanwhile (NCCL's watchdog does), so only the capturing thread is held to the rules.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = capture_stream(device)

    def warm_up(self, work: Callable[[], object]) -> None:
        """See DeviceGraphs.warm_up. On the stream of captures: libraries have a workspace per stream."""
        current: Any = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def new_pool(self) -> Any:
        """See DeviceGraphs.new_pool."""
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Made], pool: Any) -> tuple[Graph, Made]:
        """See DeviceGraphs.capture. The host waits for the GPU first."""
        graph: Any = torch.cuda.CUDAGraph()
        current: Any = torch.cuda.current_stream(self._device)
        first: list[Exception] = []

        def noted() -> Made:
            try:
                return work()
            except Exception as error:
                first.append(error)
                raise

        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                made = noted()
        except Exception as error:
            # Ending a capture that was invalidated raises once more, and leaves torch's capturing stream current.
            torch.cuda.set_stream(current)
            cause = first[0] if first else error
            raise GraphError(*cause.args) from cause
        return graph, made

    def side_stream(self) -> SideStream:
        """See DeviceGraphs.side_stream."""
        return DeviceStream(self._device, captured=True)


# What has to be known of the cluster before a job can ask for CUDA graphs.


def check_graphs(wanted: str, gpus: bool) -> None:
    """Check that the devices can capture graphs, where ``train.cuda_graphs`` insists on it.

    Raises:
        SpecError: they are CPUs.
    """
    if wanted in ("tasks", "step") and not gpus:
        raise SpecError(
            "train.cuda_graphs",
            f"{wanted} needs GPU devices, and this cluster's are CPUs",
            "use none, or auto, which captures where there are GPUs",
        )
