"""What the driver costs: its processor time a step, and how long a device stands still between two steps because of it.

Between its last task of one step and its first of the next a device reports to the driver, takes up the next call,
posts its receives. The first task may also wait for another device's message; that wait is the schedule's and is
left out: the gap counts from the later of the device's own last task and the end of the task that feeds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.recorded_steps import NO_WAITS, StepWaits
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import programs

Times = list[NDArray[np.float64]]


class RecordingClock(StepClock):
    """The driver's own clock, which also keeps every step's times and the driver's processor time."""

    def __init__(self, schedule: Schedule, pids: Sequence[int]) -> None:
        super().__init__(schedule)
        self._pids = pids
        self._collected: list[float] = []
        """When each step was collected, on this host's monotonic clock."""
        self._device_cpu: list[float] = []
        """Processor seconds of the stage actors' processes at the moment each step was collected."""
        self.steps: list[Times] = []
        self.step_s: list[float] = []
        self._driver_cpu: list[float] = []
        """Processor seconds of the driver's process, all threads, at that moment."""

    def add(
        self, part: Part, times: Times, waits: StepWaits = NO_WAITS, number: int = 0
    ) -> tuple[float, float]:  # fmt: skip
        result = super().add(part, times, waits, number)
        self.steps.append(times)
        self.step_s.append(result[0])
        self._collected.append(time.monotonic())
        self._driver_cpu.append(time.process_time())
        self._device_cpu.append(sum(map(_cpu_seconds, self._pids)))
        return result

    @property
    def device_cpu(self) -> list[float]:
        """Processor seconds of the stage actors' processes when each step ended."""
        return self._at_ends(self._device_cpu)

    @property
    def driver_cpu(self) -> list[float]:
        """Processor seconds of the driver's process, all threads, when each step ended."""
        return self._at_ends(self._driver_cpu)

    def _at_ends(self, used: Sequence[float]) -> list[float]:
        # The steps of one call are collected together, after the last of them.
        ends = [max(float(of[:, 1].max()) for of in times) for times in self.steps]
        found: list[float] = np.interp(ends, self._collected, used).tolist()
        return found


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process on this host, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def dispatch_gaps(schedule: Schedule, steps: list[Times]) -> list[float]:
    """Per device, the median seconds it stands still between two steps without waiting for another device."""
    feeders = [_feeder(schedule, device) for device in range(schedule.devices)]
    gaps: list[float] = []
    for device, feeder in enumerate(feeders):
        found = []
        for before, now in pairwise(steps):
            ready = float(before[device][:, 1].max())
            if feeder is not None:
                ready = max(ready, float(now[feeder[0]][feeder[1], 1]))
            found.append(float(now[device][0, 0]) - ready)
        gaps.append(median(found))
    return gaps


def _feeder(schedule: Schedule, device: int) -> tuple[int, int] | None:
    """Device and position of the task whose message a device's first task waits for; None if it waits for nobody."""
    compiled = programs(schedule)
    for wanted in compiled[device].actions[0].receives:
        if not wanted.local:
            for position, action in enumerate(compiled[wanted.src_device].actions):
                if wanted in action.sends:
                    return wanted.src_device, position
    return None


def driver_share(clock: RecordingClock, warm_up: int) -> tuple[float, float]:
    """Shares of a steady step: the longest standstill of a device, and the driver's processor time."""
    step_s = median(clock.step_s[warm_up:])
    gap = max(dispatch_gaps(clock.schedule, clock.steps[warm_up - 1 :]))
    cpu = clock.driver_cpu[warm_up - 1 :]
    return gap / step_s, (cpu[-1] - cpu[0]) / (len(cpu) - 1) / step_s
