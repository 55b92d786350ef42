"""Whether the nodes of a run can work together, looked at before training: storage, network, versions.

One process of each node says what it finds, all at the same time; the driver compares. What is wrong is an error that
names the node, and no restart would mend it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import raypipe
from raypipe.data import is_prepared
from raypipe.errors import ClusterError, RunError
from raypipe.runtime.communicators import Location
from raypipe.runtime.transport.interfaces import use_interface

if TYPE_CHECKING:
    from raypipe.runtime.cluster.worker_group import WorkerGroup

ANSWER_S = 60.0
"""Time that a node has to look at its own state; a network file system that hangs takes for ever."""
LOOKS, LOOK_AGAIN_S = 5, 0.5
"""Some network file systems show a new file a moment late."""


@dataclass(frozen=True, slots=True)
class HostQuestion:
    """What a node is asked."""

    directory: Path | None
    """Of the run; None where nothing is written."""
    token: str
    """Name of a file in it, and what it holds."""
    rendezvous: str
    """Address of rank 0's node."""
    one_host: bool
    """All devices are on one node."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a node answers."""

    address: str
    versions: Mapping[str, str]
    shared: bool
    """It finds the driver's token in the run's directory."""
    has_data: bool
    refusal: str
    """Why it cannot write there; empty if it can."""
    network: ClusterError | None
    """Why the other nodes cannot reach it."""


def check_hosts(workers: WorkerGroup, directory: Path | None = None) -> None:
    """Ask one process of each node (its ``report``), and judge.

    ``directory`` is the run's, if its storage matters.

    Raises:
        ClusterError: a node does not share the run's directory, cannot be reached, or runs other versions.
        RunError: a node did not answer.
    """
    import ray

    leaders = {at.peer.node: rank for rank, at in reversed(list(enumerate(workers.locations)))}
    with _token(directory) as token:
        question = HostQuestion(directory, token, workers.locations[0].address, len(leaders) == 1)
        asked = {rank: workers.actors[rank].report.remote(question) for rank in leaders.values()}
        try:
            reports = ray.get(list(asked.values()), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
            raise silent(
                [workers.locations[rank] for rank, one in asked.items() if one not in ready], directory
            ) from None
    judge(reports, directory, versions())


def silent(nodes: Sequence[Location], directory: Path | None) -> RunError:
    """The error about nodes that do not answer."""
    return RunError(
        f"node {', '.join(at.address for at in nodes)}", f"did not answer within {ANSWER_S:.0f} s",
        f"see whether the file system under {directory} hangs there" if directory else "see what keeps it busy",
    )  # fmt: skip


def judge(reports: Sequence[HostReport], directory: Path | None, own: Mapping[str, str]) -> None:
    """Compare what the nodes say with the driver's ``own`` versions.

    Raises:
        ClusterError: about the first node that does not fit.
    """
    for report in reports:
        node = f"node {report.address}"
        for name, version in own.items():
            if report.versions[name] != version:
                raise ClusterError(
                    node, f"has {name} {report.versions[name]}, and the driver {version}",
                    "install the same versions of raypipe, torch, ray and Python on every node",
                )  # fmt: skip
        if report.network is not None:
            raise report.network
        if directory is None:
            continue
        if not report.shared:
            raise ClusterError(
                node, f"has other storage under {directory} than the driver: a file that was just written is not there",
                "give --run-dir a folder of a file system that all nodes mount, or train on the devices of one node",
            )  # fmt: skip
        if not report.has_data:
            raise ClusterError(
                node, f"does not see the prepared data in {directory / 'data'}",
                "have all nodes mount that folder under the same name, or train on the devices of one node",
            )  # fmt: skip
        if report.refusal:
            raise ClusterError(
                node, f"cannot write checkpoints into {directory}: {report.refusal}",
                "let the user that runs Ray there write into it",
            )  # fmt: skip


def report_host(question: HostQuestion, address: str) -> HostReport:
    """What this node has to say; ``address`` is its own in Ray."""
    network = None
    try:
        use_interface(address, question.rendezvous, question.one_host)
    except ClusterError as error:
        network = error
    directory = question.directory
    shared = directory is not None and _finds(directory / question.token, question.token)
    return HostReport(
        address=address,
        versions=versions(),
        shared=shared,
        has_data=directory is not None and is_prepared(directory / "data"),
        refusal=_refusal(directory) if directory is not None and shared else "",
        network=network,
    )


@contextmanager
def _token(directory: Path | None) -> Iterator[str]:
    """A file that only this storage has."""
    name = f".shared-{uuid.uuid4().hex}"
    if directory is None:
        yield name
        return
    (directory / name).write_text(name, encoding="utf-8")
    try:
        yield name
    finally:
        (directory / name).unlink(missing_ok=True)


def _finds(path: Path, content: str) -> bool:
    for look in range(LOOKS):
        if look:
            time.sleep(LOOK_AGAIN_S)
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == content:
                return True
    return False


def _refusal(directory: Path) -> str:
    probe = directory / f".write-{uuid.uuid4().hex}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@cache
def versions() -> dict[str, str]:
    """What has to be the same everywhere. Of torch not the kind of build: CPU and GPU nodes may work together."""
    import ray
    import torch

    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ray": ray.__version__,
        "torch": torch.__version__.partition("+")[0],
        "raypipe": f"{raypipe.__version__} (source {_source_digest()})",
    }


def _source_digest() -> str:
    """Of raypipe's own files: two checkouts of one version may differ."""
    root = Path(raypipe.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        whole.update(os.fsencode(path.relative_to(root)) + b"\0" + path.read_bytes())
    return whole.hexdigest()[:8]
