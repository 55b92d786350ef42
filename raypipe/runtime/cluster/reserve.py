"""Reserve a run's devices: wait for them, keep them over all of its attempts, and release them at its end.

The process that starts a run reserves them, because it outlives Ray Train's controller and the driver. The attempt
after a killed one then still has its devices, and no other job can take them in between.
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

Notify = Callable[[str], None]
FIRST_S, NEXT_S, LATER_S = 1.0, 5.0, 30.0
"""When a wait is first reported; the interval of reports in the first minute; and the interval after that."""
POLL_S = 1
"""Ray's timeout for a placement group is in whole seconds."""


def silent(_message: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement group with one bundle per device."""

    group: PlacementGroup
    run_id: str
    """Eight hexadecimal digits; the id of an attempt appends ``-`` and four more."""

    def for_attempt(self) -> Reservation:
        """Return the same reservation with a new id, for one attempt at the run."""
        return replace(self, run_id=f"{self.run_id}-{uuid.uuid4().hex[:4]}")

    def wait(self, devices: int, request: DeviceRequest, timeout_s: float | None, notify: Notify) -> None:
        """Wait until the devices are reserved; ``notify`` is called with a sentence now and then.

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
                notify(f"{shortage(devices, request)}, waiting {int(waited) // 60}:{int(waited) % 60:02d}")

    def end_attempts(self) -> None:
        """Kill the workers of attempts whose driver was killed."""
        for name in list_named_actors():
            if f" · {self.run_id}-" in name:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(name))

    def give_back(self) -> None:
        """Release the devices; Ray ends the actors that still run there."""
        remove_placement_group(self.group)


def reserve(devices: int, request: DeviceRequest, timeout_s: float | None, notify: Notify = silent) -> Reservation:
    """Reserve ``devices`` devices, waiting for them as ``Reservation.wait`` does.

    Raises:
        DevicesError: they were not free within ``timeout_s``.
    """
    run_id = uuid.uuid4().hex[:8]
    group = placement_group([request.bundle() for _ in range(devices)], strategy="PACK", name=f"raypipe {run_id}")
    reservation = Reservation(group, run_id)
    try:
        reservation.wait(devices, request, timeout_s, notify)
    except BaseException:
        reservation.give_back()
        raise
    return reservation


def shortage(devices: int, request: DeviceRequest) -> str:
    """Say what is requested and what is free: ``needs 2 CPUs, 0 free``."""
    kind, each = ("GPU", request.gpus) if request.gpus else ("CPU", request.cpus)
    needed = devices * each
    free = ray.available_resources().get(kind, 0.0)
    return f"needs {needed:g} {kind}{'s' * (needed != 1)}, {free:g} free"
