"""Where a tree of processes listens, by the kernel's tables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from pathlib import Path

LISTENS = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""
WORD = 8


def session_of(leader: int) -> set[int]:
    """The processes of a session, and their descendants in sessions of their own: Ray's."""
    parents: dict[int, int] = {}
    found = {leader}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # A name is cut after fifteen bytes, perhaps within a letter.
            pid, rest = int(entry.parent.name), entry.read_bytes().rpartition(b")")[2].split()
            parents[pid] = int(rest[1])
            if int(rest[3]) == leader:
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> dict[str, str]:
    """Every address at which one of the processes listens, and the process's name."""
    holders: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(handle)):
                        holders[inode[1]] = name
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in holders:
                found[_address(fields[1])] = holders[fields[9]]
    return found


def beyond_loopback(found: dict[str, str]) -> dict[str, str]:
    """Those that other hosts could reach."""

    def stays(text: str) -> bool:
        address = ipaddress.ip_address(text.rpartition(" ")[0])
        inner = getattr(address, "ipv4_mapped", None)
        return address.is_loopback or (inner is not None and inner.is_loopback)

    return {address: name for address, name in found.items() if not stays(address)}


def _address(field: str) -> str:
    """``0100007F:1F90`` as ``127.0.0.1 8080``: the kernel writes words of the machine's own byte order."""
    host, _, port = field.partition(":")
    words = (bytes.fromhex(host[at : at + WORD])[::-1] for at in range(0, len(host), WORD))
    return f"{ipaddress.ip_address(b''.join(words))} {int(port, 16)}"
