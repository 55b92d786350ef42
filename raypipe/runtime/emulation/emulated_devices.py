"""Start emulated devices: one actor per node, which has a process of its own for each device there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import Any

import ray

from raypipe.runtime.emulation.device_processes import DeviceProcesses
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.rank_order import located_bundles
from raypipe.runtime.hosts.reserve import reserve


@dataclass(frozen=True, slots=True)
class _Call:
    """A method of a device's worker, called as one of an actor's."""

    remote: Callable[..., Any]


class EmulatedNode:
    """The actor of the devices of one node."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._turns = count()

    def calls(self, requests: Sequence[tuple[int, bytes]]) -> list[Any]:
        """See DeviceProcesses.calls; return one reference per request."""
        refs = self.actor.calls.options(num_returns=len(requests)).remote(next(self._turns), requests)
        return refs if len(requests) > 1 else [refs]


class EmulatedDevice:
    """The handle of one device, used as that of an actor of its own; calls run one after another."""

    def __init__(self, node: EmulatedNode, number: int) -> None:
        self.node, self.number = node, number

    def __getattr__(self, method: str) -> _Call:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Call(partial(self._call, method))

    def _call(self, method: str, *arguments: object) -> Any:
        return self.node.calls([(self.number, pickle.dumps((method, arguments)))])[0]


@dataclass(slots=True)
class EmulatedDevices(WorkerGroup):
    """The running emulated devices of one run; ``actors`` are their handles."""

    nodes: list[Any] = field(default_factory=list)
    """Ray's actors, one per node."""

    def processes(self) -> list[Any]:
        """See WorkerGroup.processes."""
        return self.nodes

    def call(self, method: str, *args: object) -> list[Any]:
        """See WorkerGroup.call."""
        return self._calls([pickle.dumps((method, args))] * len(self.actors))

    def call_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """See WorkerGroup.call_each."""
        return self._calls([pickle.dumps((method, args)) for args in arguments])

    def _calls(self, requests: Sequence[bytes]) -> list[Any]:
        """Send each device its request, with one call per node: a hundred calls would take Ray a second of CPU time."""
        refs: list[Any] = []
        pairs = zip(self.actors, requests, strict=True)
        for _, found in groupby(pairs, key=lambda pair: id(pair[0].node)):  # a node's ranks follow one another
            together = list(found)
            refs += together[0][0].node.calls([(device.number, request) for device, request in together])
        return self.note(refs)


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
        at = located_bundles((part.group for part in place.parts), 0.0, place.kinds)
        for _, found in groupby(range(len(titles)), key=lambda rank: at[rank].node):
            ranks = list(found)
            workers = [(rank, titles[rank], at[rank].node, at[rank].address) for rank in ranks]
            node = (
                ray.remote(DeviceProcesses)
                .options(
                    name=f"{len(ranks)} emulated devices · {place.run_id}",
                    scheduling_strategy=place.strategy(at[ranks[0]].number),
                    num_cpus=request.cpus,
                    max_restarts=0,
                )
                .remote(workers)
            )
            devices.nodes.append(node)
            shared = EmulatedNode(node)
            devices.actors += [EmulatedDevice(shared, number) for number in range(len(ranks))]
        devices.locate()
    except BaseException:
        devices.stop()  # the caller has no group yet that it could stop
        raise
    return devices
