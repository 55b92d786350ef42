"""Checks before training that the nodes of a run can work together: storage, network, versions.

One process of each node reports what it finds, all at the same time, and the driver compares the reports. A mismatch is
an error that names the node; a restart would not help.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import ray

import raypipe
from raypipe.data import is_prepared
from raypipe.errors import ClusterError, RunError
from raypipe.runtime.setup.communicators import Location, first_ranks
from raypipe.runtime.setup.network import use_interface

LOOKS, LOOK_AGAIN_S = 5, 0.5
"""Number of attempts to find a new file and the pause between them: some network file systems show files late."""


@dataclass(frozen=True, slots=True)
class HostQuestion:
    """The checks that the driver asks of every node."""

    directory: Path | None
    """The run's directory; None where nothing is written."""
    token: str
    """Name, and also content, of a file that the driver wrote there."""
    rendezvous: str
    """Address of rank 0's node."""
    one_host: bool
    """Whether all devices are on one node."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """The findings of a node."""

    address: str
    versions: Mapping[str, str]
    shared: bool
    """Whether the node sees the driver's token in the run's directory."""
    has_data: bool
    """Whether it sees the prepared data there."""
    refusal: str
    """Why the node cannot write there; empty if it can."""
    network: ClusterError | None
    """Why the other nodes cannot reach this one; None if they can."""


def report_host(question: HostQuestion, address: str) -> HostReport:
    """Check storage, network and versions of this node; ``address`` is the one by which Ray knows it."""
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
    """Return the versions that all nodes must share. torch's build (``+cpu``, ``+cu128``) may differ between nodes."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ray": _version("ray"),
        "torch": _version("torch").partition("+")[0],
        "raypipe": f"{raypipe.__version__} (source {_source_digest()})",
    }


def _version(package: str) -> str:
    """Return a package's version; importing Ray, which an emulated device does not use, takes most of a second."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(importlib.import_module(package).__version__)


def _source_digest() -> str:
    """Hash raypipe's own source files, because two checkouts of one version may differ."""
    root = Path(raypipe.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(os.fsencode(path.relative_to(root)) + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


# What the driver does with the reports.


def check_hosts(
    actors: Sequence[Any], locations: Sequence[Location], directory: Path | None = None, timeout_s: float = 300.0
) -> dict[str, str]:
    """Have one process of each node report (its ``report`` method), and compare the reports.

    Returns, by Ray's id of the node, why nodes cannot use the run's directory; ``node_files`` serves them.

    Args:
        actors: the running workers.
        locations: where they are.
        directory: the run's directory; None if nothing is written, and so storage is not checked.
        timeout_s: how long a node may take; a network file system that hangs would otherwise block for ever.

    Raises:
        ClusterError: a node cannot be reached, or runs other versions.
        RunError: a node did not answer.
    """
    leaders = first_ranks(locations)
    with _token(directory) as token:
        question = HostQuestion(directory, token, locations[0].address, len(leaders) == 1)
        asked = {rank: actors[rank].report.remote(question) for rank in leaders.values()}
        try:
            reports = ray.get(list(asked.values()), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
            raise no_answer(
                [locations[rank] for rank, one in asked.items() if one not in ready], directory, timeout_s
            ) from None
    judge(reports, versions())
    result = zip(leaders, reports, strict=True)
    return {node: why for node, report in result if directory is not None and (why := apart(report, directory))}


def no_answer(nodes: Sequence[Location], directory: Path | None, timeout_s: float) -> RunError:
    """Make the error about nodes that do not answer."""
    return RunError(
        f"node {', '.join(at.address for at in nodes)}",
        f"did not answer within {timeout_s:g} s",
        f"see whether the file system under {directory} hangs there" if directory else "see what keeps it busy",
    )


def judge(reports: Sequence[HostReport], own: Mapping[str, str]) -> None:
    """Check the nodes' reports against the driver's ``own`` versions.

    Raises:
        ClusterError: the first node that does not fit, and why.
    """
    for report in reports:
        node = f"node {report.address}"
        for name, version in own.items():
            if report.versions[name] != version:
                raise ClusterError(
                    node,
                    f"has {name} {report.versions[name]}, but the driver has {version}",
                    "install the same versions of raypipe, torch, ray and Python on every node",
                )
        if report.network is not None:
            raise report.network


def apart(report: HostReport, directory: Path) -> str:
    """Say why a node cannot read and write the run's directory as the driver does; "" if it can."""
    served = "its data and checkpoints go through Ray"
    if not report.shared:
        return f"node {report.address} does not share {directory} with the driver: {served}"
    if not report.has_data:
        return f"node {report.address} does not see the prepared data in {directory / 'data'}: {served}"
    if report.refusal:
        return f"node {report.address} cannot write checkpoints into {directory}: {report.refusal}; {served}"
    return ""


@contextmanager
def _token(directory: Path | None) -> Iterator[str]:
    """Create a file with a unique name in the run's directory; nodes that see it share the driver's storage."""
    name = f".shared-{uuid.uuid4().hex}"
    if directory is None:
        yield name
        return
    (directory / name).write_text(name, encoding="utf-8")
    try:
        yield name
    finally:
        (directory / name).unlink(missing_ok=True)
