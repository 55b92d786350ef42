"""Connect a command to Ray: to a running cluster, or to one started for this command alone.

The order is that of ``ray.init()``: the cluster named by RAY_ADDRESS, else the one that ``ray start`` last started on
this machine, else a new one. A Ray that another program's ``ray.init()`` started is not used, because it ends with
that program.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import ray

from raypipe.compat.ray_private import CURRENT_CLUSTER, NODE_ADDRESS, no_signal_handlers, on_loopback
from raypipe.errors import RunError, SpecError
from raypipe.runtime.hosts.devices import DeviceRequest, check_room, local_cpus, request_devices
from raypipe.runtime.hosts.reserve import autoscales
from raypipe.signals import held

UNREACHABLE = "start the cluster (ray start --head), or unset RAY_ADDRESS"
LOCKED = "check the port; where the cluster asks for a token, set RAY_AUTH_MODE=token (Ray does not, for a named one)"

END_S = 5.0
"""Time that the processes of a Ray started here have to end with it."""
ANSWER_S = 10.0
"""Time that a cluster has to answer a connection."""
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty HTTP/2 SETTINGS frame, which both sides send first."""
MOST_PORT = 65535
OTHER = "give the address of a running Ray of this version (ray start --head says it), or unset RAY_ADDRESS"
NOT_STARTED = (
    "try again when the machine is less busy; else check for a full disk or too little memory, and read Ray's logs in "
    "/tmp/ray/session_latest/logs"
)


def connect(
    devices: int, dashboard_port: int | None = None, emulated: bool = False, together: int = 1
) -> DeviceRequest:
    """Connect to Ray and choose what each of ``devices`` workers reserves.

    A cluster named by RAY_ADDRESS, or started on this machine with ``ray start``, is used as it is. Otherwise Ray is
    started here, bound to loopback, with as many logical CPUs as the plan needs.

    Args:
        devices: number of workers. A cluster with an autoscaler may have fewer devices for now.
        dashboard_port: port for the dashboard of a Ray started here; None for no dashboard.
        emulated: whether devices are emulated. They mostly sleep, so any number of them share the available CPUs.
        together: number of workers that must be on one node: those of a tensor-parallel group.

    Raises:
        SpecError: the cluster can never provide that many devices, or groups of them; the cluster named by RAY_ADDRESS
            does not answer; or the dashboard's port is taken.
        RunError: Ray did not start on this machine.
    """
    _join(devices, dashboard_port)
    resources = ray.cluster_resources()
    if emulated:
        return DeviceRequest(cpus=min(1.0, resources.get("CPU", 1.0) / devices), gpus=0.0)
    short = devices > resources.get("CPU", 0.0)
    grows = (short or together > 1) and autoscales()
    request = request_devices(devices, resources, grows, together)
    if together > 1 and not grows:
        check_room(devices, together, request, (node["Resources"] for node in ray.nodes() if node["Alive"]))
    return request


def connect_all(dashboard_port: int | None = None, least: int = 1) -> int:
    """Connect to Ray as ``connect`` does, and count its devices: the GPUs, or the CPUs where it has no GPU.

    A Ray started here gets CPUs for at least ``least`` devices.
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
        # What a signal interrupts in ``ray.init`` leaves processes behind.
        with no_signal_handlers(), held():
            ray.init(address=address, **quiet)
    except ConnectionError as error:
        if named:
            raise SpecError("RAY_ADDRESS", f"cannot connect to a Ray cluster at {named}: {error}", LOCKED) from None
        print(f"cannot connect to the Ray cluster at {address}: {LOCKED}. Starting one instead.", file=sys.stderr)
        return False
    except Exception as error:  # e.g. another program or another version of Ray listens; Ray has no class for these
        why = f"cannot connect to a Ray cluster at {address}: {_first_line(error)}"
        raise SpecError("RAY_ADDRESS", why, OTHER) from None
    if not named:
        hint = "RAY_ADDRESS=local starts one for this command alone"
        print(f"using the Ray cluster at {address}, which `ray start` started; {hint}", file=sys.stderr)
    return True


def _started_here() -> str | None:
    """Return the address of the cluster that ``ray start`` last started on this machine, if it still answers."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        address = (Path(folder) / CURRENT_CLUSTER).read_text(encoding="utf-8").strip()
        _check_reachable(address)
    except (OSError, UnicodeError, SpecError):  # there is none, or it was killed without `ray stop`
        return None
    return address


def _check_reachable(address: str) -> None:
    """Check that a Ray cluster listens at ``address``; ``ray.init`` tries for minutes and then ends the process.

    Raises:
        SpecError: the address is malformed, nothing answers there, or what answers does not speak HTTP/2.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > MOST_PORT:
        raise SpecError("RAY_ADDRESS", f'"{address}" is not HOST:PORT', UNREACHABLE)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as server:
            answers = os.environ.get("RAY_USE_TLS", "0") == "1" or _speaks_http2(server)
    except (OSError, UnicodeError) as error:  # a host's name may be one that cannot be encoded
        why = f"no Ray cluster answers at {address}: {getattr(error, 'strerror', None) or error}"
        raise SpecError("RAY_ADDRESS", why, UNREACHABLE) from None
    if not answers:
        raise SpecError("RAY_ADDRESS", f"what answers at {address} is no Ray cluster", UNREACHABLE)


def _speaks_http2(server: socket.socket) -> bool:
    """Return whether the other side speaks HTTP/2 (RFC 9113, section 3.4), which gRPC and so Ray run over."""
    server.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    return server.recv(len(SETTINGS))[3:4] == SETTINGS[3:4]


def _start_local(devices: int, dashboard_port: int | None, quiet: dict[str, Any]) -> None:
    gpus = _visible_gpus()
    cores = os.cpu_count() or 1
    if dashboard_port is not None:
        _check_port(dashboard_port)
    else:
        os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")  # an actor for the page of a dashboard
    cpus = local_cpus(devices, cores) if not gpus else max(devices, cores)
    if shutil.which("bash") is None:
        raise RunError("ray", "starts its workers by bash, which is not on the PATH", "install bash, or add its folder")
    _have_token()
    this = psutil.Process()
    before = set(this.children())
    try:
        with on_loopback(), no_signal_handlers(), held():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=dashboard_port is not None,
                dashboard_host="127.0.0.1",
                dashboard_port=dashboard_port,
                **{NODE_ADDRESS: "127.0.0.1"},
                **quiet,
            )
    except Exception as error:  # Ray raises the class Exception itself if one of its processes did not start in time
        with contextlib.suppress(Exception):
            ray.shutdown()
        fix = NOT_STARTED
        if isinstance(error, OSError) and error.filename is not None:
            fix = f"see that {error.filename} can be written; it is in your home directory or in Ray's, RAY_TMPDIR"
        raise RunError("ray", f"did not start on this machine: {_first_line(error)}", fix) from None
    atexit.register(_end_local, [child for child in this.children() if child not in before])


def _end_local(started: list[psutil.Process]) -> None:
    """Shut Ray down, and end what is left of the processes that it started here: one may wait for itself for ever.

    (Ray 2.60: a worker's exit frees a publisher that posts to the event loop whose end it waits for.)
    """
    family = list(started)
    for process in started:
        with contextlib.suppress(psutil.Error):
            family += process.children(recursive=True)
    ray.shutdown()
    _, left = psutil.wait_procs(family, END_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, END_S)


def _have_token() -> None:
    """Give a Ray that starts here a token of its own where Ray cannot keep one in the home directory."""
    if any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    try:
        folder = Path.home() / ".ray"
        if (folder / "auth_token").is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except (OSError, RuntimeError):  # the home is read-only, or there is none
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _first_line(error: BaseException) -> str:
    """Return class and first line of an error; the rest of Ray's messages is advice for its own developers."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check_port(port: int) -> None:
    if not 1 <= port <= MOST_PORT:
        raise SpecError("--dashboard-port", f"{port} is not a port", "use 1024 to 65535")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            with socket.socket() as other:
                other.bind(("127.0.0.1", 0))
                free = other.getsockname()[1]
            raise SpecError("--dashboard-port", f"{port} can't be used: {error.strerror}", f"{free} is free") from None
