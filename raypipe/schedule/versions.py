"""The number of weight versions that a device keeps: one in synchronous schedules, more in PipeDream's."""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.schedule.unroll import unroll


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return, per device, the largest number of versions of one stage's weights alive at once.

    It is 1 for ``flush`` and 2 for ``2bw``, the current and the previous version (Narayanan et al. 2021,
    arXiv:2006.09503). ``stash`` updates after every backward and keeps, for each micro-batch in flight, the version
    that its forward used (Narayanan et al. 2019, PipeDream, section 3.3). Its versions are counted in steady state: D -
    s on stage s, given enough micro-batches.
    """
    if schedule.versions == "flush":
        return (1,) * schedule.devices
    if schedule.versions == "2bw":
        return (2,) * schedule.devices
    peaks, backwards = [], schedule.backwards
    for order in unroll(schedule, 3).orders:
        current: dict[tuple[int, int], int] = {}
        flying: dict[tuple[int, int], dict[int, int]] = {}
        peak = 1
        for kind, stage, mbs, replica in order:
            if not backwards[stage].weight_grad:  # never updated
                continue
            key = (stage, replica)
            stash = flying.setdefault(key, {})
            now = current.setdefault(key, 0)
            if kind == "F":
                stash.update(dict.fromkeys(mbs, now))
                peak = max(peak, len({*stash.values(), now}))
            elif kind in WEIGHT_GRADIENTS:
                peak = max(peak, len({*stash.values(), now}))
                for mb in mbs:
                    stash.pop(mb, None)
                current[key] = now + 1
        peaks.append(peak)
    return tuple(peaks)


def check_versions(schedule: Schedule, limit: int) -> None:
    """Check that no device keeps more than ``limit`` versions of a stage's weights.

    Raises:
        ScheduleError: a device exceeds the limit; it names the device.
    """
    for device, versions in enumerate(weight_versions(schedule)):
        if versions > limit:
            raise ScheduleError(
                f"device {device}",
                f"{schedule.name} keeps {versions} versions of its weights, the limit is {limit}",
                "raise the limit, or use pipedream-2bw (2 versions) or a synchronous schedule (1)",
            )
