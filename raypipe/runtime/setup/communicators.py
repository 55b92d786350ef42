"""A worker's communicators: the process groups it belongs to and its channels, opened and closed together."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from raypipe.errors import ClusterError
from raypipe.runtime.process.memory import taken_beside_tensors
from raypipe.runtime.process.shared_clock import SharedClock, open_clock
from raypipe.runtime.setup.network import SilentHosts, use_interface
from raypipe.runtime.transport.channel import Peer, Receiver, Sender
from raypipe.runtime.transport.gpu.side_stream import current_gpu
from raypipe.runtime.transport.inbox import absent
from raypipe.runtime.transport.process_groups import (
    FOREVER,
    abort_groups,
    connected_on_use,
    create_groups,
    forget_groups,
)
from raypipe.runtime.transport.registry import TRANSPORTS, open_channels, served_by
from raypipe.runtime.transport.transport import Ends
from raypipe.runtime.update.norm import ONE_HOP


class Node(NamedTuple):
    """A node of the cluster."""

    id: str
    """Ray's."""
    address: str
    """The IP address by which Ray knows it."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker runs."""

    peer: Peer
    address: str
    """IP address of its node."""
    port: int
    """Port on which this worker listens; rank 0's serves the rendezvous."""
    pid: int
    model: str = ""
    """What a GPU calls itself."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Which workers communicate with each other; the same on all of them."""

    peers: tuple[Peer, ...]
    rendezvous: str
    """``tcp://address:port`` of rank 0; an IPv6 address in brackets."""
    edges: tuple[tuple[int, int], ...]
    """Directed pairs of ranks: one channel each."""
    groups: Mapping[str, tuple[int, ...]]
    """Ranks of each process group, by name."""
    transport: str
    run_id: str
    timeout_s: float = 300.0
    """How long a worker waits for the others, in set-up and in every all-reduce: ``train.message_timeout_s``."""
    served_by: Mapping[str, str] = field(default_factory=dict)
    """Further groups of a device, each with the one of ``groups`` that serves it; see ``served_by_another``."""
    addresses: tuple[str, ...] = ()
    """IP address of each worker's node, where one that falls silent is to be noticed (``SilentHosts``)."""

    def process_groups(self) -> int:
        """Count the process groups that the set-up makes, with the world's."""
        if len(self.peers) == 1:
            return 0
        channels = served_by(self.peers, self.edges, self.transport)
        return 1 + len(self.groups) + sum(len(transport.groups(edges)) for transport, edges in channels)


class Communicators:
    """The open process groups and channels of one worker. The constructor waits for all other workers.

    Args:
        rank: of the calling worker.
        topology: the same on all workers.
        backend: of the process groups, ``gloo`` or ``nccl``.
        address: of this node; None to ask Ray.

    Raises:
        ClusterError: this node has no network interface by which the others reach it.
        TransportError: a worker cannot be reached.
    """

    def __init__(self, rank: int, topology: Topology, backend: str, address: str | None = None) -> None:
        self.world: dist.ProcessGroup | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self.clock = SharedClock()
        self.silent_hosts = SilentHosts(())
        self.groups_bytes = self.channels_bytes = 0
        """What the groups, and then the channels, have taken of this process's GPU; 0 on a CPU."""
        if len(topology.peers) == 1:
            return
        nodes = [peer.node for peer in topology.peers]
        first, port = _address_of(topology.rendezvous)
        use_interface(own_address() if address is None else address, first, one_host=len(set(nodes)) == 1)
        self.silent_hosts = SilentHosts({*topology.addresses}.difference(topology.addresses[rank : rank + 1]))
        store = _meet(rank, topology, first, port)
        transport = TRANSPORTS.get(topology.transport)
        posted_ahead = transport is not None and transport.over_world_group
        limit = timedelta(seconds=topology.timeout_s)
        try:
            # What is sent on the world's groups are shares of the gradient norm, by many ranks to a few each.
            with connected_on_use(len(topology.peers) > ONE_HOP):
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=rank,
                    world_size=len(topology.peers),
                    timeout=FOREVER if posted_ahead else limit,
                )
                # Collectives keep the message timeout also where messages on the world's group may take any time.
                self.world = dist.new_group(timeout=limit, backend="gloo") if posted_ahead else dist.group.WORLD
            self.clock = open_clock(rank, nodes, first, store, topology.run_id, timeout_s=topology.timeout_s)
            before = self._taken(backend)
            self.groups = create_groups(topology.groups, backend, topology.timeout_s)
            self.groups_bytes = self._taken(backend) - before
            self.senders, self.receivers = open_channels(
                topology.peers[rank],
                topology.peers,
                topology.edges,
                topology.transport,
                topology.run_id,
                timeout_s=topology.timeout_s,
            )
            self.channels_bytes = self._taken(backend) - before - self.groups_bytes
        except RuntimeError as error:  # torch's, of Gloo, NCCL or the store
            abort_groups()
            self.close()
            raise absent(error) from error
        except BaseException:
            abort_groups()
            self.close()  # so that the worker's next set-up can join another world
            raise

    @staticmethod
    def _taken(backend: str) -> int:
        return taken_beside_tensors(current_gpu()) if backend == "nccl" else 0

    def leave(self) -> list[Any]:
        """Close every channel, and return the groups: their connections end with the last reference to them.

        Unlike ``close`` it may be called while collectives are under way, and never waits for them.
        """
        held: list[Any] = [self.world, *self.groups.values(), self.senders, self.receivers]
        if dist.is_initialized():
            held.append(dist.group.WORLD)
        abort_groups()
        self.close()
        self.world, self.groups, self.senders, self.receivers = None, {}, {}, {}
        return held

    def close(self) -> None:
        """Close every channel and leave every group."""
        self.silent_hosts.close()
        self.clock.close()
        Ends(self.senders, self.receivers).close()
        if dist.is_initialized():
            dist.destroy_process_group()
            forget_groups()


_listening: dict[int, socket.socket] = {}
"""The listening socket that this process last reported to the driver, by port."""


def _address_of(rendezvous: str) -> tuple[str, int]:
    at = urlsplit(rendezvous)
    assert at.hostname is not None
    assert at.port is not None
    return at.hostname, at.port


def _meet(rank: int, topology: Topology, address: str, port: int) -> Any:
    """Open the store through which the workers find each other; rank 0 serves it."""
    listener = _listening.pop(port, None) if rank == 0 else None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            len(topology.peers),
            is_master=rank == 0,
            timeout=timedelta(seconds=topology.timeout_s),
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    except RuntimeError as error:
        raise absent(error) from error


def _has_reserved_gpu() -> bool:
    import ray  # an emulated device does without

    return bool(ray.get_runtime_context().get_assigned_resources().get("GPU"))


def locate(rank: int, title: str, device: torch.device, node: Node | None = None) -> Location:
    """Return where the calling process runs, and listen there so that its port is not taken before the rendezvous.

    Args:
        rank: of the worker.
        title: how errors call it.
        device: what it computes on.
        node: where it is; None for an actor, which asks Ray.

    Raises:
        ClusterError: the device is one of AMD's, or the actor has reserved a GPU and does not see it.
    """
    if node is None:
        node = own_node()
        if device.type == "cpu" and _has_reserved_gpu():
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
            why = f"has reserved a GPU and sees none: torch is built for {built}, CUDA_VISIBLE_DEVICES={seen}"
            raise ClusterError(title, why, "install a CUDA build of torch there, or start Ray with --num-gpus 0")
    name, model = "cpu", ""
    if device.type == "cuda":
        if torch.version.hip:
            raise ClusterError(
                title, "its torch is built for ROCm, which nothing here is written for", "use CUDA's build"
            )
        properties = torch.cuda.get_device_properties(device)
        name, model = f"cuda:{properties.uuid}", properties.name
    for old in _listening.values():
        old.close()
    _listening.clear()
    opened = socket.create_server((node.address, 0), family=socket.AF_INET6 if ":" in node.address else socket.AF_INET)
    port = opened.getsockname()[1]
    _listening[port] = opened
    lacks = tuple(name for name, transport in TRANSPORTS.items() if not transport.available())
    return Location(Peer(rank, node.id, name, title, lacks), node.address, port, os.getpid(), model)


def check_devices(locations: Sequence[Location]) -> None:
    """Check that the workers' devices can be joined.

    Raises:
        ClusterError: some have a GPU and others none, or several are slices of GPUs (MIG), which NCCL cannot join.
    """
    without = [at.peer.name for at in locations if at.peer.device == "cpu"]
    if without and len(without) < len(locations):
        why = f"torch finds no GPU there, and {len(locations) - len(without)} other workers have one"
        raise ClusterError(without[0], why, "install torch's CUDA build on its node, or hide the GPUs of all nodes")
    slices = [at.peer.name for at in locations if " MIG " in f"{at.model} "]
    if slices and len(locations) > 1:
        why = "its device is a slice of a GPU (MIG), and NCCL joins no slices"
        raise ClusterError(slices[0], why, "use whole GPUs, or one worker")


def sharers(locations: Sequence[Location]) -> list[int]:
    """Return, for each worker, how many have its device and so its memory: a GPU, or the CPUs of a host."""
    on = Counter((at.peer.node, at.peer.device) for at in locations)
    return [on[at.peer.node, at.peer.device] for at in locations]


def own_node() -> Node:
    """Return the node of the calling actor."""
    import ray

    return Node(ray.get_runtime_context().get_node_id(), own_address())


def own_address() -> str:
    """Return the IP address by which Ray knows this process's node."""
    import ray.util

    return str(ray.util.get_node_ip_address()).strip("[]")


def first_ranks(locations: Sequence[Location]) -> dict[str, int]:
    """Return the first rank on each node, by Ray's id of the node."""
    return {at.peer.node: rank for rank, at in reversed(list(enumerate(locations)))}


def rendezvous_of(locations: list[Location]) -> str:
    """Return the URL of the rendezvous, which rank 0 serves."""
    first = locations[0]
    return f"tcp://[{first.address}]:{first.port}" if ":" in first.address else f"tcp://{first.address}:{first.port}"
