"""A network switch in user space that holds every packet for a set time, for kernels without ``tc netem``.

    python -m tests.delayed_switch --delay-s 0.002 PID ...

Gives each process's network namespace an ``eth0`` (a tap device whose other end this process reads) and passes packets
from one to the other until its standard input ends; the devices end with it. Prints ``ready`` once they exist. Needs
root.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MTU = 9000
"""Jumbo frames: a sixth of the packets, for Python has to pass on each."""
LARGEST = 1 << 16


def tap(name: str) -> int:
    """Make a network device of this name; return the file through which its packets come and go."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def plug(port: int, pid: int) -> int:
    """Give the process's network namespace an ``eth0`` and return our end of it."""
    name = f"tap{port}"
    fd = tap(name)
    for words in (["mtu", str(MTU)], ["netns", str(pid), "name", "eth0"]):
        subprocess.run(["ip", "link", "set", name, *words], check=True, capture_output=True)
    return fd


def forward(ports: list[int], delay_s: float) -> None:
    """Pass packets between the ports, each ``delay_s`` after it came, until standard input ends."""
    learnt: dict[bytes, int] = {}
    held: list[tuple[float, int, int, bytes]] = []  # due, serial number (packets keep their order), port, packet
    serial = 0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([0, *ports], [], [], wait_s)
        if 0 in ready:
            return
        now = time.monotonic()
        for port in ready:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(port, LARGEST):
                    learnt[packet[6:12]] = port
                    target = learnt.get(packet[:6])
                    for to in [target] if target is not None else [other for other in ports if other != port]:
                        serial += 1
                        heapq.heappush(held, (now + delay_s, serial, to, packet))
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, _, to, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):  # a device that is down, or full: as on a network, the packet is lost
                os.write(to, packet)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.delayed_switch", description=__doc__)
    parser.add_argument("--delay-s", type=float, required=True, help="one way")
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    args = parser.parse_args()
    ports = [plug(port, pid) for port, pid in enumerate(args.pids)]
    print("ready", flush=True)
    forward(ports, args.delay_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
