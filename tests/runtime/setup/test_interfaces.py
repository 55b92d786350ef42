"""The interface that process groups use follows from Ray's address, never from the host's name."""

from __future__ import annotations

import os

import pytest

from raypipe.errors import ClusterError
from raypipe.runtime.setup import network
from raypipe.runtime.setup.network import (
    GLOO,
    NCCL,
    InterfaceAddress,
    cluster_interface,
    host_addresses,
    use_interface,
)

HOST = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("lo", "127.0.1.1"),
    InterfaceAddress("eth0", "192.168.7.2"),
    InterfaceAddress("ib0", "10.0.0.2"),
    InterfaceAddress("ib0", "10.0.0.99"),
    InterfaceAddress("lo", "::1"),
    InterfaceAddress("eth0", "fe80::1%eth0"),
    InterfaceAddress("eth1", "fd00::0:2"),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> None:
    monkeypatch.setattr(network, "host_addresses", lambda: HOST)
    monkeypatch.setattr(network, "_ours", {})
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("own", "name"),
    [("10.0.0.2", "ib0"), ("10.0.0.99", "ib0"), ("192.168.7.2", "eth0"), ("fd00::2", "eth1"), ("[fd00::2]", "eth1")],
)
def test_it_is_the_one_that_carries_the_address(own, name) -> None:
    assert cluster_interface(own, "10.0.0.1", HOST) == name


def test_an_address_that_no_interface_carries() -> None:
    with pytest.raises(
        ClusterError, match=r"(?s)node 34\.1\.2\.3: none of its .*--node-ip-address.*GLOO_SOCKET_IFNAME"
    ):
        cluster_interface("34.1.2.3", "10.0.0.1", HOST)


def test_loopback_leads_to_no_other_host() -> None:
    for own in ("127.0.0.1", "127.0.1.1", "::1"):
        with pytest.raises(ClusterError, match="loopback"):
            cluster_interface(own, "10.0.0.1", HOST)
    assert cluster_interface("127.0.0.1", "127.0.0.1", HOST) == "lo"  # two raylets on one machine


def test_a_process_may_serve_one_host_and_then_several() -> None:
    use_interface("10.0.0.2", "10.0.0.2", one_host=True)
    assert (os.environ[GLOO], os.environ.get(NCCL)) == ("lo", None)
    use_interface("10.0.0.2", "10.0.0.1", one_host=False)
    assert (os.environ[GLOO], os.environ[NCCL]) == ("ib0", "=ib0")
    use_interface("10.0.0.2", "10.0.0.2", one_host=True)
    assert (os.environ[GLOO], os.environ.get(NCCL)) == ("lo", None)


def test_a_users_own_setting_wins(monkeypatch) -> None:
    monkeypatch.setenv(GLOO, "eth7")
    for one_host in (False, True):
        use_interface("10.0.0.2", "10.0.0.1", one_host)
        assert os.environ[GLOO] == "eth7"
    monkeypatch.setenv(NCCL, "mlx5")
    use_interface("34.1.2.3", "10.0.0.1", one_host=False)  # nothing is left to find out
    assert (os.environ[GLOO], os.environ[NCCL]) == ("eth7", "mlx5")


def test_this_host_has_loopback(monkeypatch) -> None:
    monkeypatch.undo()
    assert "127.0.0.1" in [host_address.address for host_address in host_addresses()]
