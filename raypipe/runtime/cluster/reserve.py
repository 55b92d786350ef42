"""Devices reserved for a run: waited for in the open, kept over all of its attempts, given back at its end.

The process that starts a run reserves them, for it outlives Ray Train's controller and the driver: an attempt that
replaces a killed one then finds its devices where they were, and no other job takes them in between.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raypipe.errors import DevicesError
from raypipe.runtime.cluster.devices import DeviceRequest
from raypipe.runtime.transport.same_host.shared_memory import cleanup

Tell = Callable[[str], None]
FIRST_S, NEXT_S, LATER_S = 1.0, 5.0, 30.0
"""When a wait is told first; then how often in the first minute, and after that."""
POLL_S = 1
"""Ray counts the time that it waits for a placement group in whole seconds."""


def silent(_message: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement group with one bundle per device."""

    group: PlacementGroup
    run_id: str
    """Eight hexadecimal digits; those of attempts begin with their run's."""

    def for_attempt(self) -> Reservation:
        """The same devices under an id of one attempt at the run."""
        return replace(self, run_id=f"{self.run_id}-{uuid.uuid4().hex[:4]}")

    def wait(self, devices: int, request: DeviceRequest, timeout_s: float | None, tell: Tell) -> None:
        """Wait until the devices are there; ``tell`` hears of it now and then.

        Raises:
            DevicesError: they were not free within ``timeout_s``.
        """
        begun = time.monotonic()
        due = FIRST_S
        while True:
            if self.group.wait(POLL_S):
                return
            waited = time.monotonic() - begun
            if timeout_s is not None and waited >= timeout_s:
                raise DevicesError(
                    "devices",
                    f"{devices} x {request.describe()} were not free within {timeout_s:.0f} s",
                    "wait for other jobs to end, raise train.wait_for_devices_s (null: no limit), "
                    "or ask for fewer stages or replicas",
                )
            if waited >= due:
                due = waited + (NEXT_S if waited < 60 else LATER_S)
                tell(f"{shortage(devices, request)}, waiting {int(waited) // 60}:{int(waited) % 60:02d}")

    def end_attempts(self) -> None:
        """End what an attempt left whose driver was killed: its stage actors and its shared memory."""
        for name in list_named_actors():
            if f" · {self.run_id}-" in name:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(name))
        cleanup(self.run_id)

    def give_back(self) -> None:
        """Let others have the devices; whatever runs there ends."""
        remove_placement_group(self.group)


def reserve(devices: int, request: DeviceRequest, timeout_s: float | None, tell: Tell = silent) -> Reservation:
    """Reserve that many devices, waiting for them as ``Reservation.wait`` does.

    Raises:
        DevicesError: they were not free within ``timeout_s``.
    """
    run_id = uuid.uuid4().hex[:8]
    group = placement_group([request.bundle() for _ in range(devices)], strategy="PACK", name=f"raypipe {run_id}")
    reservation = Reservation(group, run_id)
    try:
        reservation.wait(devices, request, timeout_s, tell)
    except BaseException:
        reservation.give_back()
        raise
    return reservation


def shortage(devices: int, request: DeviceRequest) -> str:
    """What is asked for and what is free: ``needs 2 CPUs, 0 free``."""
    kind, each = ("GPU", request.gpus) if request.gpus else ("CPU", request.cpus)
    needed = devices * each
    free = ray.available_resources().get(kind, 0.0)
    return f"needs {needed:g} {kind}{'s' * (needed != 1)}, {free:g} free"
