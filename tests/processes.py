"""Trees of processes, and where they listen."""

from __future__ import annotations

import contextlib
import ipaddress
import os

import psutil


def descendants(root: int) -> dict[int, str]:
    """Process ids below ``root`` and their titles, parents first."""
    result: dict[int, str] = {}
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            result[process.pid] = " ".join(process.cmdline()).strip()
    return result


def session_of(leader: int) -> set[int]:
    """The processes of a session, and their descendants in sessions of their own: Ray's."""
    parents: dict[int, int] = {}
    result = {leader}
    for process in psutil.process_iter(["ppid"]):
        with contextlib.suppress(OSError):
            parents[process.pid] = process.info["ppid"]
            if os.getsid(process.pid) == leader:
                result.add(process.pid)
    while more := {pid for pid, parent in parents.items() if parent in result} - result:
        result |= more
    return result


def named(pids: set[int], name: str) -> bool:
    """Return if one of the processes has this name."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).name() == name:
                return True
    return False


def listening(pids: set[int]) -> dict[str, str]:
    """Every address at which one of the processes listens, and the process's name."""
    result: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for net_connection in process.net_connections("inet"):
                if net_connection.status == psutil.CONN_LISTEN:
                    result[f"{net_connection.laddr.ip} {net_connection.laddr.port}"] = process.name()
    return result


def beyond_loopback(found: dict[str, str]) -> dict[str, str]:
    """Those that other hosts could reach."""

    def stays(text: str) -> bool:
        address = ipaddress.ip_address(text.rpartition(" ")[0])
        inner = getattr(address, "ipv4_mapped", None)
        return address.is_loopback or (inner is not None and inner.is_loopback)

    return {address: name for address, name in found.items() if not stays(address)}
