"""Start emulated devices: one actor per node, which has a process of its own for each device there."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import ray

from raypipe.runtime.cluster.devices import DeviceRequest
from raypipe.runtime.cluster.rank_order import bundles_in_rank_order
from raypipe.runtime.cluster.reserve import reserve
from raypipe.runtime.cluster.worker_group import WorkerGroup
from raypipe.runtime.emulation.device_processes import DeviceProcesses


@dataclass(frozen=True, slots=True)
class _Call:
    """A method of a device's worker, called as one of an actor's."""

    remote: Callable[..., Any]


class EmulatedDevice:
    """The handle of one device, used as that of an actor of its own; calls run one after another."""

    def __init__(self, node: Any, number: int) -> None:
        self._node, self._number = node, number

    def __getattr__(self, method: str) -> _Call:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Call(partial(self._call, method))

    def _call(self, method: str, *arguments: object) -> Any:
        in_order = self._node.call.options(concurrency_group=_group(self._number))
        return in_order.remote(self._number, pickle.dumps((method, arguments)))


@dataclass(slots=True)
class EmulatedDevices(WorkerGroup):
    """The running emulated devices of one run; ``actors`` are their handles."""

    nodes: list[Any] = field(default_factory=list)
    """Ray's actors, one per node."""

    def processes(self) -> list[Any]:
        """See WorkerGroup.processes."""
        return self.nodes


def start_emulated_devices(
    titles: list[str], request: DeviceRequest, timeout_s: float | None = 120.0
) -> EmulatedDevices:
    """Reserve ``request`` for each title, and start a process with an ``EmulatedWorker`` for it, by rank.

    Raises:
        DevicesError: the resources were not free within ``timeout_s``.
    """
    place = reserve(len(titles), request, timeout_s)
    devices = EmulatedDevices([], titles, [], place.run_id, place)
    try:
        at = bundles_in_rank_order((part.group for part in place.parts), 0.0, place.kinds)
        for _, found in groupby(range(len(titles)), key=lambda rank: at[rank].node):
            ranks = list(found)
            workers = [(rank, titles[rank], at[rank].node, at[rank].address) for rank in ranks]
            node = (
                ray.remote(concurrency_groups={_group(number): 1 for number in range(len(ranks))})(DeviceProcesses)
                .options(
                    name=f"{len(ranks)} emulated devices · {place.run_id}",
                    scheduling_strategy=place.strategy(at[ranks[0]].number),
                    num_cpus=request.cpus,
                    max_restarts=0,
                )
                .remote(workers)
            )
            devices.nodes.append(node)
            devices.actors += [EmulatedDevice(node, number) for number in range(len(ranks))]
        devices.locate()
    except BaseException:
        devices.stop()  # the caller has no group yet that it could stop
        raise
    return devices


def _group(number: int) -> str:
    """Return the name of a device's concurrency group, which keeps its calls in order."""
    return f"device {number}"
