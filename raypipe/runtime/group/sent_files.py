"""Files for nodes that do not share the run's directory, through Ray's object store.

The driver sends such a node the prepared data, and the checkpoint to resume from, into a folder of the node's own. One
worker of the node takes them; all of its workers read them there. A checkpoint's shards go the other way: a worker puts
its shard into the object store, and the driver writes it into the run's directory. Every file is verified by its digest
and appears whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from raypipe.checkpoint import ShardInfo
from raypipe.checkpoint.manifest import put
from raypipe.errors import CheckpointError
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.runtime.hosts.node_files import SentShard, chunks_of, listed
from raypipe.runtime.setup.communicators import own_address

AT_ONCE = 4
"""Pieces under way to the nodes."""


class NodeFiles(NamedTuple):
    """Where a node that does not share the run's directory has its files."""

    data: Path
    """Folder of the prepared data."""
    checkpoint: Path | None
    """The checkpoint to resume from."""


def run_key(directory: Path) -> str:
    """Return what identifies a run among all nodes."""
    return f"{own_address()} {directory.resolve()}"


def send_folder(workers: WorkerGroup, ranks: Sequence[int], folder: Path, run: str, name: str) -> list[Path]:
    """Send all files of a folder to the nodes of some ranks, one per node; return its path on each of them.

    Raises:
        ClusterError: a node did not take a file as it was sent.
    """
    listing = listed(folder)
    actors = [workers.actors[rank] for rank in ranks]
    here = ray.get([actor.on_node.remote("begin_folder", run, name, listing) for actor in actors])
    missing = [actor for actor, has in zip(actors, here, strict=True) if not has]
    pending: deque[list[Any]] = deque()
    for file in listing if missing else ():
        for offset, data in chunks_of(folder / file):
            chunk = ray.put(data)
            pending.append([actor.on_node.remote("take_chunk", run, name, file, offset, chunk) for actor in missing])
            if len(pending) >= AT_ONCE:
                ray.get(pending.popleft())
    for calls in pending:
        ray.get(calls)
    ray.get([actor.on_node.remote("end_folder", run, name, listing) for actor in missing])
    at: list[Path] = ray.get([actor.on_node.remote("node_folder", run) for actor in actors])
    return [root / name for root in at]


def received(directory: Path, shard: ShardInfo | SentShard) -> ShardInfo:
    """Write a shard into a checkpoint's directory, if its worker could not; return what the manifest lists.

    Raises:
        CheckpointError: it cannot be written, or is not what the worker sent.
    """
    if isinstance(shard, ShardInfo):
        return shard
    path = directory / shard.info.file
    digest = hashlib.sha256()

    def write(partial: Path) -> None:
        with partial.open("wb") as out:
            for chunk in shard.chunks:
                data = ray.get(chunk)
                digest.update(data)
                out.write(data)

    put(path, write)
    if digest.hexdigest() != shard.info.sha256:
        path.unlink()
        raise CheckpointError(str(path), "is not what its worker sent", "run again; the network or memory is at fault")
    return shard.info


def files_of_nodes(
    workers: WorkerGroup, apart: Mapping[str, str], directory: Path, checkpoint: Path | None
) -> dict[str, NodeFiles]:
    """Send the data, and the checkpoint to resume from, to the nodes that do not share the run's directory.

    Args:
        workers: the running worker group.
        apart: by node, why it does not share the directory (``host_check.check_hosts``).
        directory: the run's directory.
        checkpoint: where to resume from; None to start afresh.

    Returns:
        By node, where its files are.

    Raises:
        ClusterError: a node did not take a file as it was sent.
    """
    if not apart:
        return {}
    run = run_key(directory)
    leaders = leaders_of(workers, apart)
    ranks = list(leaders.values())
    data = send_folder(workers, ranks, directory / "data", run, "data")
    resumed: Sequence[Path | None] = [None] * len(ranks)
    if checkpoint is not None:
        resumed = send_folder(workers, ranks, checkpoint, run, "checkpoint")
    return {node: NodeFiles(*places) for node, places in zip(leaders, zip(data, resumed, strict=True), strict=True)}


def clear(workers: WorkerGroup, apart: Mapping[str, str], directory: Path) -> None:
    """Have the nodes delete what they took for a run."""
    calls = [
        workers.actors[rank].on_node.remote("clear_files", run_key(directory))
        for rank in leaders_of(workers, apart).values()
    ]
    ray.get(calls)


def leaders_of(workers: WorkerGroup, nodes: Mapping[str, str]) -> dict[str, int]:
    """Return the first rank on each of some nodes."""
    first = workers.first_ranks()
    return {node: first[node] for node in nodes}
