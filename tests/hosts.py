"""Several hosts on one machine, made of Linux namespaces: what a test needs to see two machines disagree.

Each host has its own network interface, process ids, host name, monotonic clock, /dev/shm and /tmp/ray; a bridge joins
their networks and the machine's own is not touched. The rest of the file system is shared, as on a cluster that
mounts one; ``Host.hide`` covers a folder of it. A host is held by a process that ends when its standard input does, so
nothing is left behind, even by a test that is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ray_environment import forking, without_ray

ISOLATED = ("--mount", "--uts", "--ipc", "--net", "--pid", "--time")
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
GCS_PORT = 6379
READY_S = 240.0
NOTICES = {
    f"RAY_health_check_{name}": value
    for name, value in {"period_ms": "1000", "timeout_ms": "5000", "failure_threshold": "3"}.items()
}
"""Of the head, as docs/guides/failures.md advises: a raylet that was killed is noticed after 3 s, and not after 15."""


@dataclass(frozen=True)
class Host:
    """One of them; ``pid`` is its first process as this machine sees it."""

    address: str
    pid: int

    def command(self, *words: str) -> list[str]:
        """What runs ``words`` on this host."""
        return ["nsenter", f"--target={self.pid}", *ISOLATED, "--", *words]

    def run(self, *words: str, timeout_s: float = READY_S, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with ``settings`` in its environment."""
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=timeout_s, env=environment(**settings)
        )

    def must(self, *words: str, **settings: str) -> None:
        """The same for a command that has to succeed."""
        done = self.run(*words, **settings)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"

    def hide(self, folder: Path) -> None:
        """From now on the folder is empty on this host, and its own: what others write there is not seen."""
        self.must("mount", "-t", "tmpfs", "none", str(folder))


def environment(**settings: str) -> dict[str, str]:
    """This process's, without what would lead to another Ray; a token has no use in a network of our own."""
    ours = {k: v for k, v in without_ray().items() if not k.startswith(("GLOO_", "NCCL_"))}
    return {**ours, "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", **settings}


def need_hosts() -> None:
    """Skip the calling test where such hosts cannot be made."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"hosts in namespaces need root and {', '.join(missing or TOOLS)}")
    flags = [*ISOLATED, "--monotonic", "1", "--fork", "--mount-proc"]
    if subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode:
        pytest.skip("this kernel, or the sandbox, does not let us make namespaces")


@contextmanager
def hosts(
    count: int, *, rate: str | None = None, delay_s: float | None = None,
    clock_offsets_s: Sequence[int] = (), ipv6: bool = False,
) -> Iterator[list[Host]]:  # fmt: skip
    """``count`` hosts with one network.

    Args:
        rate: of each host's outgoing link, as ``tc`` writes it ("200mbit").
        delay_s: how long each packet is on its way (``delayed_switch``); None for as short as it gets.
        clock_offsets_s: of each host's monotonic clock against this machine's; 0 for the rest. No clock may begin
            below zero, so for clocks behind the first host's that one is put ahead.
        ipv6: give them IPv6 addresses only.
    """
    need_hosts()
    with ExitStack() as held:
        bridge = "ip link add bridge type bridge && ip link set bridge up"
        switch = held.enter_context(_namespace(["--net"], bridge))
        result = []
        for n in range(count):
            offset = clock_offsets_s[n] if n < len(clock_offsets_s) else 0
            flags = [*ISOLATED, "--monotonic", str(offset), "--mount-proc"]
            private = "mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && mount -t tmpfs none /dev/shm"
            pid = held.enter_context(_namespace(flags, f"{private} && ip link set lo up"))
            result.append(Host(f"fd99::{n + 1}" if ipv6 else f"10.99.0.{n + 1}", pid))
        if delay_s is None:
            _join(switch, result)
        else:
            held.enter_context(_join_delayed(switch, result, delay_s))
        for host in result:
            own = [f"{host.address}/64", "dev", "eth0", "nodad"] if ipv6 else [f"{host.address}/24", "dev", "eth0"]
            host.must("ip", "address", "add", *own)
            host.must("ip", "link", "set", "eth0", "up")
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
                host.must("tc", "qdisc", "add", "dev", "eth0", "root", *shape)
        yield result


def _join(switch: int, members: Sequence[Host]) -> None:
    """Give every host an ``eth0`` on the switch's bridge."""
    plug = ["nsenter", f"--target={switch}", "--net", "ip", "link"]
    for n, host in enumerate(members):
        peer = ["peer", "name", "eth0", "netns", str(host.pid)]
        subprocess.run([*plug, "add", f"port{n}", "type", "veth", *peer], check=True, capture_output=True)
        subprocess.run([*plug, "set", f"port{n}", "master", "bridge", "up"], check=True, capture_output=True)


@contextmanager
def _join_delayed(switch: int, members: Sequence[Host], delay_s: float) -> Iterator[None]:
    """The same with a switch that holds every packet for a while."""
    words = [sys.executable, "-m", "tests.delayed_switch", "--delay-s", str(delay_s), *(str(m.pid) for m in members)]
    process = subprocess.Popen(
        ["nsenter", f"--target={switch}", "--net", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the switch did not start: is there a /dev/net/tun?"
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _namespace(flags: Sequence[str], prepare: str) -> Iterator[int]:
    """A process in namespaces of its own, by its id; all that runs in them ends with it."""
    # The shell stays, for it takes leave of the processes that lose their parent.
    holder = subprocess.Popen(
        ["unshare", *flags, "--fork", "--kill-child", "sh", "-c", f"{prepare} && echo ready && cat; true"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stderr is not None
        assert holder.stdout.readline() == "ready\n", holder.stderr.read()
        (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        yield int(child)
    finally:
        holder.kill()  # --kill-child: the shell ends with it, and with a first process its whole namespace
        holder.communicate()


@contextmanager
def ray_cluster(members: Sequence[Host], cpus: int = 1, forks: bool = True) -> Iterator[dict[str, str]]:
    """A Ray cluster with a raylet on every host, the first one's being the head; gives the settings that lead to it.

    It ends with the hosts. ``forks``: see ``tests.ray_environment.start_ray``.
    """
    head = members[0].address
    at = f"[{head}]:{GCS_PORT}" if ":" in head else f"{head}:{GCS_PORT}"
    settings = forking() if forks else {}
    members[0].must(
        *_start(members[0], cpus), "--head", "--port", str(GCS_PORT), "--include-dashboard=false", **settings, **NOTICES
    )
    for host in members[1:]:
        host.must(*_start(host, cpus), "--address", at, **settings)
    yield {"RAY_ADDRESS": at}


def start_raylet(host: Host, settings: dict[str, str], cpus: int) -> str:
    """Start a raylet that forks nothing on a host that has lost its own; return why it did not start, if so."""
    done = host.run(*_start(host, cpus), "--address", settings["RAY_ADDRESS"])
    return done.stderr if done.returncode else ""


def _start(host: Host, cpus: int) -> list[str]:
    own = ["--num-cpus", str(cpus), "--object-store-memory", str(100 << 20), "--disable-usage-stats"]
    return [str(Path(sys.executable).with_name("ray")), "start", "--node-ip-address", host.address, *own]
