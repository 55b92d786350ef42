"""A device's connections: the process groups it belongs to and its channels, opened and closed together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from raypipe.runtime.transport.channel import Peer, Receiver, Sender
from raypipe.runtime.transport.gloo import FOREVER
from raypipe.runtime.transport.groups import create_groups
from raypipe.runtime.transport.mesh import open_channels


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor came up."""

    peer: Peer
    address: str
    """IP address of its node."""
    port: int
    """A port that was free there a moment ago; rank 0's carries the rendezvous."""
    pid: int


@dataclass(frozen=True, slots=True)
class Wiring:
    """Who talks to whom; the same on all devices."""

    peers: tuple[Peer, ...]
    rendezvous: str
    """``tcp://host:port`` of rank 0."""
    edges: tuple[tuple[int, int], ...]
    """Directed device pairs that exchange messages."""
    groups: Mapping[str, tuple[int, ...]]
    """Ranks of each group that sums gradients, by name."""
    transport: str
    run_id: str
    timeout_s: float = 300.0
    """How long a device waits for the others, in set-up and in every gradient sum."""


class Links:
    """What ``Wiring`` means for one device. Making it waits for all the others."""

    def __init__(self, rank: int, wiring: Wiring, backend: str) -> None:
        self.world: dist.ProcessGroup | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        if len(wiring.peers) == 1:
            return
        if len({p.node for p in wiring.peers}) == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # Ray's Gloo group passes its messages over the world's own group, posted long before anybody waits for them.
        messages = wiring.transport == "ray-collective"
        dist.init_process_group(
            "gloo", init_method=wiring.rendezvous, rank=rank, world_size=len(wiring.peers),
            timeout=FOREVER if messages else timedelta(seconds=wiring.timeout_s),
        )  # fmt: skip
        try:
            self.world = dist.group.WORLD
            self.groups = create_groups(wiring.groups, backend, wiring.timeout_s)
            self.senders, self.receivers = open_channels(
                wiring.peers[rank], wiring.peers, wiring.edges, wiring.transport, wiring.run_id
            )
        except BaseException:
            self.close()  # the actor's next set-up joins another world
            raise

    def close(self) -> None:
        """Close every channel and leave every group."""
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def locate(rank: int, title: str, device: torch.device) -> Location:
    """Say where the calling actor runs."""
    import ray
    import ray.util

    name = "cpu"
    if device.type == "cuda":
        name = f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return Location(Peer(rank, ray.get_runtime_context().get_node_id(), name, title), address, port, os.getpid())


def rendezvous_of(locations: list[Location]) -> str:
    """Where the devices meet: rank 0's address, loopback when all are on one host."""
    first = locations[0]
    one_host = len({x.peer.node for x in locations}) == 1
    return f"tcp://{'127.0.0.1' if one_host else first.address}:{first.port}"
