"""Checks before training that the nodes of a run can work together: storage, network, versions.

One process of each node reports what it finds (``host_report``), all at the same time, and the driver compares the
reports. A mismatch is an error that names the node; a restart would not help.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray

from raypipe.errors import ClusterError, RunError
from raypipe.runtime.cluster.host_report import HostQuestion, HostReport, versions
from raypipe.runtime.cluster.worker_group import WorkerGroup
from raypipe.runtime.communicators import Location


def check_hosts(workers: WorkerGroup, directory: Path | None = None, timeout_s: float = 300.0) -> None:
    """Have one process of each node report (its ``report`` method), and compare the reports.

    Args:
        workers: the running worker group.
        directory: the run's directory; None if nothing is written, and so storage is not checked.
        timeout_s: how long a node may take; a network file system that hangs would otherwise block for ever.

    Raises:
        ClusterError: a node does not share the run's directory, cannot be reached, or runs other versions.
        RunError: a node did not answer.
    """
    leaders = {at.peer.node: rank for rank, at in reversed(list(enumerate(workers.locations)))}
    with _token(directory) as token:
        question = HostQuestion(directory, token, workers.locations[0].address, len(leaders) == 1)
        asked = {rank: workers.actors[rank].report.remote(question) for rank in leaders.values()}
        try:
            reports = ray.get(list(asked.values()), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)
            raise no_answer(
                [workers.locations[rank] for rank, one in asked.items() if one not in ready], directory, timeout_s
            ) from None
    judge(reports, directory, versions())


def no_answer(nodes: Sequence[Location], directory: Path | None, timeout_s: float) -> RunError:
    """Make the error about nodes that do not answer."""
    return RunError(
        f"node {', '.join(at.address for at in nodes)}", f"did not answer within {timeout_s:g} s",
        f"see whether the file system under {directory} hangs there" if directory else "see what keeps it busy",
    )  # fmt: skip


def judge(reports: Sequence[HostReport], directory: Path | None, own: Mapping[str, str]) -> None:
    """Check the nodes' reports against the driver's ``own`` versions and the run's directory.

    Raises:
        ClusterError: the first node that does not fit, and why.
    """
    for report in reports:
        node = f"node {report.address}"
        for name, version in own.items():
            if report.versions[name] != version:
                raise ClusterError(
                    node, f"has {name} {report.versions[name]}, but the driver has {version}",
                    "install the same versions of raypipe, torch, ray and Python on every node",
                )  # fmt: skip
        if report.network is not None:
            raise report.network
        if directory is None:
            continue
        if not report.shared:
            raise ClusterError(
                node, f"does not share {directory} with the driver: it does not see a file that was just written there",
                "give --run-dir a folder of a file system that all nodes mount, or train on the devices of one node",
            )  # fmt: skip
        if not report.has_data:
            raise ClusterError(
                node, f"does not see the prepared data in {directory / 'data'}",
                "mount that folder under the same name on all nodes, or train on the devices of one node",
            )  # fmt: skip
        if report.refusal:
            raise ClusterError(
                node, f"cannot write checkpoints into {directory}: {report.refusal}",
                "give the user that runs Ray on that node write permission",
            )  # fmt: skip


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
