"""Selects the network interface of process groups: the one that has the address by which Ray knows the node.

Left alone, Gloo resolves the host's own name, which on many machines (Debian's default among them) is a loopback
address: the other hosts then connect to themselves. Ray's address is known to lead here, for the cluster was made
with it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from raypipe.errors import ClusterError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


class InterfaceAddress(NamedTuple):
    """An address of this host."""

    interface: str
    address: str


def use_interface(own: str, rendezvous: str, one_host: bool) -> None:
    """Make the process groups of this process use the right interface from now on.

    A setting of the user's (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) is left as it is.

    Args:
        own: this node's address in Ray.
        rendezvous: that of rank 0's node.
        one_host: all devices are on this node; then Gloo uses loopback, and NCCL chooses for itself.

    Raises:
        ClusterError: no interface of this host carries ``own``, or only loopback does.
    """
    if one_host:
        _set(GLOO, interface_of(LOOPBACK, host_addresses()))
        _set(NCCL, None)
    elif not (_users(GLOO) and _users(NCCL)):
        name = cluster_interface(own, rendezvous, host_addresses())
        _set(GLOO, name)
        _set(NCCL, f"={name}")  # without it NCCL also takes every interface whose name begins so


def cluster_interface(own: str, rendezvous: str, addresses: Iterable[InterfaceAddress]) -> str:
    """The interface by which other nodes reach this one.

    Raises:
        ClusterError: none does.
    """
    fix = f"start Ray on it with --node-ip-address=ADDRESS, one of its own, or set {GLOO} there to the interface"
    name = interface_of(own, addresses)
    if name is None:
        raise ClusterError(f"node {own}", "none of its network interfaces carries the address that Ray has for it", fix)
    # Nodes that share one loopback address are one machine.
    if _plain(own).is_loopback and _plain(own) != _plain(rendezvous):
        raise ClusterError(f"node {own}", "is known to Ray by a loopback address, which other nodes cannot reach", fix)
    return name


def interface_of(address: str, addresses: Iterable[InterfaceAddress]) -> str | None:
    """The interface that carries an address.

    >>> interface_of("10.0.0.2", [InterfaceAddress("lo", "127.0.0.1"), InterfaceAddress("eth0", "10.0.0.2")])
    'eth0'
    """
    wanted = _plain(address)
    return next((one.interface for one in addresses if _plain(one.address) == wanted), None)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.strip("[]").partition("%")[0])


_ours: dict[str, str] = {}
"""Settings that this process made itself; an actor serves one plan after another."""


def _users(variable: str) -> bool:
    value = os.environ.get(variable)
    return bool(value) and value != _ours.get(variable)


def _set(variable: str, value: str | None) -> None:
    if _users(variable):
        return
    if value is None:
        os.environ.pop(variable, None)
        _ours.pop(variable, None)
    else:
        os.environ[variable] = _ours[variable] = value


def host_addresses() -> list[InterfaceAddress]:
    """All IPv4 and IPv6 addresses of this host's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        InterfaceAddress(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in families
    ]
