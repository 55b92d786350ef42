"""Every private name of Ray that raypipe uses, and what happens where the installed Ray has it no more.

Ray has no public call for these things. No run stops for one that is gone: each function here then does without, as
``NAMES`` says; only a transport that a job asks for by name is refused by name. ``tests/compat`` looks for every name.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from raypipe.compat import PrivateName

CHECKED = "2.60"
"""The newest version of Ray whose private names were checked."""


_STATE = "ray._private.state"
_CONSTANTS = "ray._private.ray_constants"
_REASONS = "ray.core.generated.autoscaler_pb2"
_DATASETS = "ray.train.v2._internal.callbacks.datasets"
_TRAINER = "ray.train.v2.api.data_parallel_trainer"
NAMES = (
    PrivateName(
        _STATE,
        "available_resources_per_node",
        "what is free on each node: an elastic run reserves its devices node by node",
        "it reserves them as one group, and counts what is free in the whole cluster",
    ),
    PrivateName(
        _STATE,
        "state.get_draining_nodes",
        "nodes that will go soon: the run saves, or leaves them, before they do",
        "their loss is noticed when they are gone",
    ),
    PrivateName(
        "ray._raylet",
        "GcsClient",
        "nodes that the file `leaving` of a run names are drained: the run saves, or leaves them, before they go",
        "such a file is refused with a notice",
    ),
    PrivateName(_REASONS, "DrainNodeReason", "the reason that is given for it", "the same"),
    PrivateName(
        "ray.experimental.internal_kv",
        "_internal_kv_get",
        "the report of autoscaler v1: a cluster that may grow is waited for",
        "such a cluster counts as one that does not grow",
    ),
    PrivateName(
        "ray.autoscaler.v2.sdk",
        "get_cluster_status",
        "whether autoscaler v2 runs, for the same",
        "the same",
    ),
    PrivateName(
        _CONSTANTS,
        "ENABLE_RAY_CLUSTER",
        "a Ray that raypipe starts listens on loopback alone",
        "its servers listen on the host's address",
    ),
    PrivateName(
        _CONSTANTS,
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER",
        "a signal ends a run in order, with a checkpoint, and not below Python with a stack of C++",
        "a fault of the C library prints Ray's stack as well",
    ),
    PrivateName(
        "ray._private.utils",
        "set_sigterm_handler",
        "SIGTERM ends a run in order, with a checkpoint",
        "a SIGTERM while Ray starts ends the process without a word",
    ),
    PrivateName(
        "ray.train.v2._internal.execution.checkpoint.checkpoint_manager",
        "_CheckpointManagerState",
        "Ray Train's own check of its list of checkpoints, which is renamed where it is damaged",
        "the list is checked by its keys alone",
    ),
    PrivateName(
        _DATASETS,
        "DatasetsCallback",
        "Ray Train starts no process that hands out datasets, of which a run gives it none",
        "it starts one",
    ),
    PrivateName(_TRAINER, "DataParallelTrainer._create_default_callbacks", "the same", "the same"),
)

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable of processes that Ray's job server has started; elsewhere a run's directory is below the working one."""
CURRENT_CLUSTER = "ray/ray_current_cluster"
"""File below the temporary folder that has the address of the cluster ``ray start`` last started on a machine. Without
it, a Ray is started for the command."""
NODE_ADDRESS = "_node_ip_address"
"""Keyword of ``ray.init``; one that does not know it says so by name."""
AUTOSCALING_STATUS = b"__autoscaling_status"
"""Key under which the monitor of autoscaler v1 publishes its report."""
KILLED_FOR_MEMORY = "NODE_OUT_OF_MEMORY"
"""How the error of an actor's death says that Ray's memory monitor has killed it, for which there is no class."""


def find(module: str, name: str) -> Any | None:
    """Return a private name of Ray; None where the installed Ray does not have it."""
    try:
        result: Any = importlib.import_module(module)
        for part in name.split("."):
            result = getattr(result, part)
    except (ImportError, AttributeError):
        return None
    return result


def available_per_node() -> Mapping[str, Mapping[str, float]] | None:
    """Return the free resources of each node, by Ray's id of the node; None if that cannot be known."""
    ask = find(_STATE, "available_resources_per_node")
    return None if ask is None else ask()


def draining_nodes() -> set[str]:
    """Return the ids of nodes that will go soon: a cloud takes them back, or somebody called ``ray drain-node``."""
    ask = find(_STATE, "state.get_draining_nodes")
    return set() if ask is None else set(ask())


def drain_node(gcs_address: str, node: str, why: str, seconds: float) -> str | None:
    """Tell Ray that a node will go, as ``ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION`` does.

    Args:
        gcs_address: of the cluster.
        node: Ray's id of it.
        why: shown by Ray.
        seconds: until it goes.

    Returns why Ray does not accept that; None if it does.
    """
    client, reasons = find("ray._raylet", "GcsClient"), find(_REASONS, "DrainNodeReason")
    drain = getattr(client(address=gcs_address), "drain_node", None) if client is not None else None
    if drain is None or reasons is None:
        return "this version of Ray has no call for it"
    reason, at = reasons.Value("DRAIN_NODE_REASON_PREEMPTION"), int((time.time() + seconds) * 1000)
    accepted, refusal = drain(node, reason, why, at)
    return None if accepted else str(refusal)


def autoscaler_report() -> Mapping[str, Any] | None:
    """Return what autoscaler v1's monitor has published; None if there is none."""
    ask = find("ray.experimental.internal_kv", "_internal_kv_get")
    published = None if ask is None else ask(AUTOSCALING_STATUS)
    return json.loads(published) if published else None


def second_autoscaler_runs(gcs_address: str) -> bool:
    """Return whether an autoscaler v2 has reported its state."""
    ask = find("ray.autoscaler.v2.sdk", "get_cluster_status")
    return ask is not None and bool(ask(gcs_address).stats.autoscaler_version)


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have a Ray that is started in this context know its node by 127.0.0.1, so that all its servers bind to that.

    ``NODE_ADDRESS`` alone does not do it: ``ray.init`` replaces a loopback address by one of the host's others, unless
    clusters are off, as they are on systems other than Linux.
    """
    with _replaced(_CONSTANTS, "ENABLE_RAY_CLUSTER", False):
        yield


@contextlib.contextmanager
def no_signal_handlers() -> Iterator[None]:
    """Have ``ray.init`` install no handlers of signals in this process; Ray's other processes keep theirs.

    Ray's own would end this process without a word, one of them, below Python, with a stack of C++.
    """
    with (
        _replaced("ray._private.utils", "set_sigterm_handler", lambda _: None),
        _replaced(_CONSTANTS, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: str, name: str, value: object) -> Iterator[None]:
    before = find(module, name)
    if before is None:
        yield
        return
    owner = importlib.import_module(module)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def validate_snapshot(snapshot: Any) -> None:
    """Validate Ray Train's list of checkpoints as Ray Train does, where it still has that class; raise what it does."""
    state = find("ray.train.v2._internal.execution.checkpoint.checkpoint_manager", "_CheckpointManagerState")
    if state is not None:
        (getattr(state, "model_validate", None) or state.parse_obj)(snapshot)  # pydantic 1's in older Rays


def without_datasets(trainer: Any) -> Any:
    """Have a trainer of Ray Train that has no datasets start no process for them; return it."""
    kind, make = find(_DATASETS, "DatasetsCallback"), getattr(trainer, "_create_default_callbacks", None)
    if kind is not None and make is not None:
        trainer._create_default_callbacks = lambda: [one for one in make() if not isinstance(one, kind)]
    return trainer


def streams_of(group: Any) -> dict[Any, list[Any]] | None:
    """Return the streams of an NCCL group of ``ray.util.collective``, by device, to be set; None if they are not there.

    Ray has no public way to have its group run on another stream.
    """
    streams = getattr(group, "_dev_streams_map", None)
    return streams if isinstance(streams, dict) and len(streams) == 1 else None


class Death(NamedTuple):
    """Facts in Ray's text about an actor's death, whose error has no fields for them."""

    name: str | None
    pid: str | None
    why: str | None


def death_of(text: str) -> Death:
    """Read the text of the error of an actor's death, which is a page with ids."""
    name = re.search(r"^\s*name: (.*?)(?: · [0-9a-f]{8}\S*)?$", text, re.MULTILINE)
    pid = re.search(r"^\s*pid: (\d+)$", text, re.MULTILINE)
    why = re.search(r"Worker exit detail: (.*?)(?: There are some potential root causes.*)?$", text, re.MULTILINE)
    return Death(*(one.group(1) if one else None for one in (name, pid, why)))
