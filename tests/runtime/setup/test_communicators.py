"""Where devices meet: addresses of both kinds."""

from __future__ import annotations

import pytest

from raypipe.runtime.setup.communicators import Location, _address_of, rendezvous_of
from raypipe.runtime.transport.channel import Peer


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_the_rendezvous_is_rank_0s_address(address) -> None:
    places = [Location(Peer(rank, "node", "cpu", f"stage {rank}"), address, 4000 + rank, 1) for rank in range(2)]
    assert _address_of(rendezvous_of(places)) == (address, 4000)
