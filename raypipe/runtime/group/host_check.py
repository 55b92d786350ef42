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
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.runtime.hosts.host_report import HostQuestion, HostReport, versions
from raypipe.runtime.setup.communicators import Location


def check_hosts(workers: WorkerGroup, directory: Path | None = None, timeout_s: float = 300.0) -> dict[str, str]:
    """Have one process of each node report (its ``report`` method), and compare the reports.

    Returns, by Ray's id of the node, why nodes cannot use the run's directory; ``node_files`` serves them.

    Args:
        workers: the running worker group.
        directory: the run's directory; None if nothing is written, and so storage is not checked.
        timeout_s: how long a node may take; a network file system that hangs would otherwise block for ever.

    Raises:
        ClusterError: a node cannot be reached, or runs other versions.
        RunError: a node did not answer.
    """
    leaders = workers.first_ranks()
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
    judge(reports, versions())
    found = zip(leaders, reports, strict=True)
    return {node: why for node, report in found if directory is not None and (why := apart(report, directory))}


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
