"""The Ray that a command uses: the cluster named or started on this machine, else one for this command alone.

As ``ray.init()`` has it: RAY_ADDRESS; else the cluster that ``ray start`` last put up here; else a fresh one. The Ray
that another program's ``ray.init()`` runs for itself is left alone, for it ends with that program.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray

from raypipe.errors import RunError, SpecError
from raypipe.runtime.cluster.autoscaler import autoscales
from raypipe.runtime.cluster.devices import DeviceRequest, local_cpus, request_devices

UNREACHABLE = "start the cluster (ray start --head), or unset RAY_ADDRESS"
LOCKED = "check the port; where the cluster asks for a token, set RAY_AUTH_MODE=token (Ray does not, for a named one)"

ANSWER_S = 10.0
"""Time that a cluster has to answer a connection."""
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty HTTP/2 frame of the type that both sides begin with."""
OTHER = "give the address of a running Ray of this version (ray start --head says it), or unset RAY_ADDRESS"
NOT_STARTED = (
    "try again when the machine is less busy; else look for a full disk, too little memory and Ray's own words in "
    "/tmp/ray/session_latest/logs"
)


def connect(devices: int, dashboard_port: int | None = None, emulated: bool = False) -> DeviceRequest:
    """Connect to Ray and say what each of ``devices`` actors reserves.

    Emulated devices sleep most of their time, so any number of them share the CPUs there are.

    A cluster named by RAY_ADDRESS, or started on this machine with ``ray start``, is used as it is; else Ray is
    started here, bound to loopback, with as many logical CPUs as the plan needs.

    A cluster with an autoscaler may have fewer devices than that for now.

    Raises:
        SpecError: the cluster can never give that many devices, RAY_ADDRESS names one that does not answer, or the
            dashboard's port is taken.
        RunError: Ray did not come up on this machine.
    """
    _join(devices, dashboard_port)
    resources = ray.cluster_resources()
    if emulated:
        return DeviceRequest(cpus=min(1.0, resources.get("CPU", 1.0) / devices), gpus=0.0)
    short = devices > resources.get("CPU", 0.0)
    return request_devices(devices, resources, grows=short and autoscales())


def connect_all(dashboard_port: int | None = None, least: int = 1) -> int:
    """Connect to Ray as ``connect`` does; returns how many devices there are: GPUs, or CPUs where there are none.

    A Ray that is started here gets CPUs for ``least`` devices.
    """
    _join(least, dashboard_port)
    resources = ray.cluster_resources()
    return int(resources.get("GPU", 0.0)) or max(1, int(resources.get("CPU", 1.0)))


def _join(devices: int, dashboard_port: int | None) -> None:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if not ray.is_initialized() and not _join_running(quiet):
        _start_local(devices, dashboard_port, quiet)


def _join_running(quiet: dict[str, Any]) -> bool:
    named = os.environ.get("RAY_ADDRESS", "")
    if named == "local":
        return False
    address = named or _started_here()
    if address is None:
        return False
    if named not in ("", "auto"):
        _check_reachable(named)
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        if named:
            raise SpecError("RAY_ADDRESS", f"no Ray cluster lets us in at {named}: {error}", LOCKED) from None
        print(f"the Ray cluster at {address} does not let us in: {LOCKED}. Starting one instead.", file=sys.stderr)
        return False
    except Exception as error:  # Ray has no class for it: another program listens there, another version of Ray, ...
        raise SpecError("RAY_ADDRESS", f"no Ray cluster lets us in at {address}: {_first_line(error)}", OTHER) from None
    if not named:
        hint = "RAY_ADDRESS=local starts one for this command alone"
        print(f"using the Ray cluster at {address}, which `ray start` put up; {hint}", file=sys.stderr)
    return True


def _started_here() -> str | None:
    """Address of the cluster that ``ray start`` last put up on this machine and that still answers."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        address = (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
        _check_reachable(address)
    except (OSError, SpecError):  # none, or one that was killed without a `ray stop`
        return None
    return address


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes, and then ends the process; one connection tells at once."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise SpecError("RAY_ADDRESS", f'"{address}" is not HOST:PORT', UNREACHABLE)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as server:
            answers = os.environ.get("RAY_USE_TLS", "0") == "1" or _speaks_http2(server)
    except OSError as error:
        why = f"no Ray cluster answers at {address}: {error.strerror or error}"
        raise SpecError("RAY_ADDRESS", why, UNREACHABLE) from None
    if not answers:
        raise SpecError("RAY_ADDRESS", f"what answers at {address} is no Ray cluster", UNREACHABLE)


def _speaks_http2(server: socket.socket) -> bool:
    """Whether the other side speaks what gRPC, and so all of Ray, goes over: RFC 9113, section 3.4."""
    server.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    return server.recv(len(SETTINGS))[3:4] == SETTINGS[3:4]


def _start_local(devices: int, dashboard_port: int | None, quiet: dict[str, Any]) -> None:
    gpus = _visible_gpus()
    cores = os.cpu_count() or 1
    if dashboard_port is not None:
        _check_port(dashboard_port)
    cpus = local_cpus(devices, cores) if not gpus else max(devices, cores)
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=dashboard_port is not None,
            dashboard_host="127.0.0.1",
            dashboard_port=dashboard_port,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
    except Exception as error:  # Ray raises Exception itself where a process of its own did not come up in time
        with contextlib.suppress(Exception):
            ray.shutdown()
        raise RunError("ray", f"did not start on this machine: {_first_line(error)}", NOT_STARTED) from None


def _first_line(error: BaseException) -> str:
    """The first sentence of what Ray says; the rest is a page of advice for its own developers."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise SpecError("--dashboard-port", f"{port} is not a port", "use 1024 to 65535")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            with socket.socket() as other:
                other.bind(("127.0.0.1", 0))
                free = other.getsockname()[1]
            raise SpecError("--dashboard-port", f"{port} can't be used: {error.strerror}", f"{free} is free") from None
