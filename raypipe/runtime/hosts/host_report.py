"""Report a node to the driver before training, to show that it can work with the others."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import raypipe
from raypipe.data import is_prepared
from raypipe.errors import ClusterError
from raypipe.runtime.transport.interfaces import use_interface

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
