"""Whether the nodes of a run can work together, looked at before training: storage, network, versions.

One process of each node says what it finds (``host_report``), all at the same time; the driver compares. What is wrong
is an error that names the node, and no restart would mend it.
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

ANSWER_S = 60.0
"""Time that a node has to look at its own state; a network file system that hangs takes for ever."""


def check_hosts(workers: WorkerGroup, directory: Path | None = None) -> None:
    """Ask one process of each node (its ``report``), and judge.

    ``directory`` is the run's, if its storage matters.

    Raises:
        ClusterError: a node does not share the run's directory, cannot be reached, or runs other versions.
        RunError: a node did not answer.
    """
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
