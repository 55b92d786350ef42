"""The transports that the shared tests run over: all of the registry that can join two CPU devices of one host."""

from __future__ import annotations

from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.registry import TRANSPORTS

PEERS = [Peer(0, "n0", "cpu", "stage 0"), Peer(1, "n0", "cpu", "stage 1")]
BETWEEN_CPUS = [name for name, transport in TRANSPORTS.items() if not transport.refusal(*PEERS)]
IN_ACTORS = {"ray-collective"}
"""Those that work only inside Ray actors: ``test_ray_collective`` runs the shared scenarios there."""
