"""Channels over ``ray.util.collective`` groups: Gloo for CPU tensors, NCCL through cupy for GPUs.

Its send and receive block, so each direction of an edge has a thread. What Ray's groups are like (2.60) decides the
rest:

* The Gloo group joins the process's torch.distributed world if there is one, must span all of it with equal ranks, and
  passes messages over the world's default group. So there is one Ray group for all edges, nobody else may use
  point-to-point on the default group, and after a failure the world must be joined anew (stage actors are restarted).
* The NCCL group makes its communicator at the first message, one per pair of ranks for both directions, on a stream
  that synchronises with torch's default stream: two facing edges could lock up. So there is one group per directed
  edge, warmed up in order, and moved to a stream of ours (``RayLink``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.compat.ray_private import streams_of
from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import PUSH_EVERY_S, Peer, Progress
from raypipe.runtime.transport.framed.frame_channel import FrameReceiver, FrameSender
from raypipe.runtime.transport.gpu.nccl import edge_stream, put_on_top
from raypipe.runtime.transport.gpu.side_stream import CopyStream, current_gpu
from raypipe.runtime.transport.inbox import Allocate, empty
from raypipe.runtime.transport.process_groups import in_rounds
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport


class RayCollective(Transport):
    """Ray's groups: Gloo between CPU devices, NCCL between different GPUs; no edge joins a CPU device and a GPU."""

    over_world_group = True

    def refusal(self, src: Peer, dst: Peer) -> str:
        """See Transport.refusal."""
        if (src.device == "cpu") != (dst.device == "cpu"):
            return "its groups can't join a GPU and a CPU device"
        if src.device == dst.device != "cpu":
            return "its groups use NCCL, which can't connect two stages on one GPU"
        return ""

    def over_cpu_channel(self, src: Peer, dst: Peer) -> bool:
        """See Transport.over_cpu_channel."""
        return src.device != "cpu"

    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        """See Transport.open."""
        on_cpus = [edge for edge in edges if opening.peers[edge[0]].device == "cpu"]
        if on_cpus:
            name = open_gloo_group(dist.get_world_size(), opening.me.rank, opening.run_id)
            for peer in opening.destinations(on_cpus):
                ends.out[peer.rank] = ray_sender(peer, name)
            for peer in opening.sources(on_cpus):
                ends.into[peer.rank] = RayReceiver(peer, name, opening.progress, opening.allocate)
        on_gpus = [edge for edge in edges if edge not in on_cpus]
        for index in chain(*in_rounds(on_gpus)):
            edge = on_gpus[index]
            if opening.me.rank in edge:
                side = CopyStream(current_gpu(), edge_stream(edge, opening))
                name = f"raypipe-{opening.run_id}-{edge[0]}-{edge[1]}"
                link = RayLink(name, opening.me.rank == edge[0], side.device)
                put_on_top(edge, link, side, opening, ends)
                link.adopt(side.stream)


def open_gloo_group(world_size: int, rank: int, run_id: str) -> str:
    """Join the Ray group of the whole run and return its name; every rank calls this at the same point.

    Raises TransportError outside a Ray actor.
    """
    return _join(world_size, rank, "gloo", f"raypipe-{run_id}")


def _join(world_size: int, rank: int, backend: str, name: str) -> str:
    from ray.util import collective

    try:
        collective.init_collective_group(world_size, rank, backend=backend, group_name=name)
    except RuntimeError as error:
        raise TransportError(f"ray.util.collective group {name}", str(error), "use transport: auto") from error
    return name


def ray_sender(peer: Peer, group: str) -> FrameSender[Tensor]:
    """Make the sending end for CPU tensors."""
    from ray.util import collective

    return FrameSender(peer, lambda frame: frame, lambda frame: collective.send(frame, peer.rank, group))


class RayReceiver(FrameReceiver):
    """Receiving end for CPU tensors; its thread receives each frame that was announced."""

    def __init__(
        self,
        peer: Peer,
        group: str,
        progress: Progress | None = None,
        allocate: Allocate = empty,
    ) -> None:
        super().__init__(peer, progress, allocate)
        self._group = group
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"receive from rank {peer.rank}", daemon=True).start()

    def close(self) -> None:
        """See Receiver.close."""
        self._wanted.put(False)

    def _announce(self, count: int) -> None:
        for _ in range(count):
            self._wanted.put(True)

    def _next_frame(self, deadline: float) -> Tensor:
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            wait_s = min(left_s, PUSH_EVERY_S) if self._progress.push() else left_s
            try:
                frame = self._came.get(timeout=wait_s)
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                continue
            if frame is None:
                self._came.put(None)
                raise ConnectionError
            return frame

    def _run(self) -> None:
        from ray.util import collective

        while self._wanted.get():
            frame = self._pool.get()
            try:
                collective.recv(frame, self._peer.rank, self._group)
            except Exception:
                self._came.put(None)
                return
            self._came.put(frame)


class RayLink:
    """A two-rank NCCL group of Ray's for one directed edge (``nccl.Link``).

    Made by both ends at the same point. After the first message, call ``adopt``.

    Raises:
        TransportError: no cupy, or the actor sees more GPUs than its own.
    """

    def __init__(self, name: str, sends: bool, device: torch.device) -> None:
        try:
            import cupy  # noqa: F401  Ray's group imports it, and would only say that NCCL is not there
        except ImportError as error:
            raise TransportError(
                "transport: ray-collective", f"no CuPy: {error}", _cupy_for(torch.version.cuda)
            ) from None
        if device.index not in (0, None):
            # Ray's group looks its communicator up by the peer's GPU index, and takes that to be 0.
            raise TransportError("transport: ray-collective", f"the actor's GPU is {device}", "give each actor one GPU")
        self._group = _join(2, 0 if sends else 1, "nccl", name)
        self._peer = 1 if sends else 0
        self._stream: Any = None

    def adopt(self, stream: torch.cuda.Stream) -> None:
        """Run on this stream from now on. Raises TransportError where this Ray keeps its streams elsewhere."""
        import cupy
        from ray.util import collective

        streams = streams_of(collective.get_group_handle(self._group))
        if streams is None:
            raise TransportError("transport: ray-collective", "this Ray keeps its streams elsewhere", "transport: nccl")
        self._stream = cupy.cuda.ExternalStream(stream.cuda_stream)
        for key in streams:
            streams[key] = [self._stream]

    def send(self, tensor: Tensor) -> None:
        """See nccl.Link.send."""
        from ray.util import collective

        with self._stream or contextlib.nullcontext():
            collective.send(tensor, self._peer, self._group)

    def recv(self, tensor: Tensor) -> None:
        """See nccl.Link.recv."""
        from ray.util import collective

        with self._stream or contextlib.nullcontext():
            collective.recv(tensor, self._peer, self._group)

    def close(self) -> None:
        """Leave the group. The end that made its rendezvous actor removes the actor."""
        from ray.util import collective

        with contextlib.suppress(Exception):  # the peer, or Ray itself, may be gone already
            collective.destroy_collective_group(self._group)


def _cupy_for(cuda: str | None) -> str:
    """Say which extra has the CuPy for the CUDA that torch is built for.

    >>> _cupy_for("13.0"), _cupy_for("12.8"), _cupy_for("14.1")
    ("pip install 'raypipe[gpu]'", "pip install 'raypipe[gpu12]'", 'install the CuPy for CUDA 14.1')
    """
    extra = {"13": "gpu", "12": "gpu12"}.get((cuda or "").partition(".")[0])
    return f"pip install 'raypipe[{extra}]'" if extra else f"install the CuPy for CUDA {cuda}"
