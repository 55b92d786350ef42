"""A device's connections: the process groups it belongs to and its channels, opened and closed together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from raypipe.runtime.shared_clock import SharedClock, open_clock
from raypipe.runtime.transport.channel import Peer, Receiver, Sender
from raypipe.runtime.transport.framed.gloo import FOREVER
from raypipe.runtime.transport.interfaces import use_interface
from raypipe.runtime.transport.mesh import open_channels
from raypipe.runtime.transport.registry import TRANSPORTS
from raypipe.runtime.transport.replica_groups import create_groups
from raypipe.runtime.transport.transport import Ends


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor came up."""

    peer: Peer
    address: str
    """IP address of its node."""
    port: int
    """Where this actor listens; rank 0's carries the rendezvous."""
    pid: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Who talks to whom; the same on all devices."""

    peers: tuple[Peer, ...]
    rendezvous: str
    """``tcp://address:port`` of rank 0; an IPv6 address in brackets."""
    edges: tuple[tuple[int, int], ...]
    """Directed device pairs that exchange messages."""
    groups: Mapping[str, tuple[int, ...]]
    """Ranks of each group that sums gradients, by name."""
    transport: str
    run_id: str
    timeout_s: float = 300.0
    """How long a device waits for the others, in set-up and in every gradient sum."""


class Communicators:
    """What ``Topology`` means for one device. Making it waits for all the others."""

    def __init__(self, rank: int, topology: Topology, backend: str) -> None:
        self.world: dist.ProcessGroup | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self.clock = SharedClock()
        if len(topology.peers) == 1:
            return
        nodes = [peer.node for peer in topology.peers]
        address, port = _address_of(topology.rendezvous)
        use_interface(own_address(), address, one_host=len(set(nodes)) == 1)
        store = _meet(rank, topology, address, port)
        transport = TRANSPORTS.get(topology.transport)
        posted_ahead = transport is not None and transport.over_world_group
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=len(topology.peers),
            timeout=FOREVER if posted_ahead else timedelta(seconds=topology.timeout_s),
        )  # fmt: skip
        try:
            self.world = dist.group.WORLD
            self.clock = open_clock(rank, nodes, address, store, topology.run_id)
            self.groups = create_groups(topology.groups, backend, topology.timeout_s)
            self.senders, self.receivers = open_channels(
                topology.peers[rank], topology.peers, topology.edges, topology.transport, topology.run_id
            )
        except BaseException:
            self.close()  # the actor's next set-up joins another world
            raise

    def close(self) -> None:
        """Close every channel and leave every group."""
        self.clock.close()
        Ends(self.senders, self.receivers).close()
        if dist.is_initialized():
            dist.destroy_process_group()


_doors: dict[int, socket.socket] = {}
"""The listening socket that this process last told the driver of, by port."""


def _address_of(rendezvous: str) -> tuple[str, int]:
    at = urlsplit(rendezvous)
    assert at.hostname is not None
    assert at.port is not None
    return at.hostname, at.port


def _meet(rank: int, topology: Topology, address: str, port: int) -> Any:
    """The store through which the devices find each other; rank 0 serves it."""
    door = _doors.pop(port, None) if rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, len(topology.peers), is_master=rank == 0, timeout=timedelta(seconds=topology.timeout_s),
        master_listen_fd=door.detach() if door is not None else None,
    )  # fmt: skip


def locate(rank: int, title: str, device: torch.device) -> Location:
    """Say where the calling actor runs, and listen there: nobody else can take the port before the devices meet."""
    import ray

    name = "cpu"
    if device.type == "cuda":
        name = f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    address = own_address()
    for old in _doors.values():
        old.close()
    _doors.clear()
    door = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = door.getsockname()[1]
    _doors[port] = door
    lacks = tuple(name for name, transport in TRANSPORTS.items() if not transport.available())
    peer = Peer(rank, ray.get_runtime_context().get_node_id(), name, title, lacks)
    return Location(peer, address, port, os.getpid())


def own_address() -> str:
    """IP address by which Ray knows this process's node."""
    import ray.util

    return str(ray.util.get_node_ip_address()).strip("[]")


def rendezvous_of(locations: list[Location]) -> str:
    """Where the devices meet: where rank 0 listens."""
    first = locations[0]
    return f"tcp://[{first.address}]:{first.port}" if ":" in first.address else f"tcp://{first.address}:{first.port}"
