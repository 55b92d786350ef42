"""raypipe's side: the real driver and stage actors on a local Ray, one block at a time; and what the driver costs."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import ray
from numpy.typing import NDArray

from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.recorded_steps import NO_WAITS, StepWaits
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.worker.worker_group import WorkerGroup, start_worker_group, titles_of
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import programs
from tests.bench.head_to_head.cases import DEVICES
from tests.bench.head_to_head.rivals import Block, forget_peak, peak_bytes


@dataclass(frozen=True, slots=True)
class DriverCost:
    """Shares of a steady step."""

    standstill: float
    cpu: float


class RaypipeSide:
    """A Ray of its own and one pair of stage actors, which every block sets up anew from the start weights."""

    def __init__(self, folder: Path) -> None:
        os.environ["RAY_ADDRESS"] = "local"
        # Ray's workers run at niceness 15 by default: beside any other load they would hardly run, the rivals would.
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._folder = folder
        self._request = connect(DEVICES)
        self.workers: WorkerGroup | None = None

    def start(self, job: JobSpec, plan: Plan) -> None:
        """Fresh stage actors: their first step is a first step."""
        if self.workers is not None:
            self.workers.stop()
        schedule = build_schedule(plan, job.train.batch)
        titles = titles_of(schedule, plan.parallel.replicas, 1)
        self.workers = start_worker_group(titles, reserve(schedule.devices, self._request, 120.0))

    def block(self, job: JobSpec, plan: Plan, data: Path, warm_up: int) -> tuple[Block, DriverCost]:
        """Train ``job`` to its end; what the driver does after the last step (validation, checkpoint) is not timed."""
        if self.workers is None:
            self.start(job, plan)
        assert self.workers is not None
        locations = ray.get(self.workers.call("locate"))  # a fresh port for every rendezvous
        workers = self.workers = replace(self.workers, locations=locations, run_id=uuid.uuid4().hex[:8])
        directory = self._folder / f"run-{workers.run_id}"
        directory.mkdir()
        (directory / "data").symlink_to(data)
        log = RunLog(directory)
        driver = Driver(job, plan, directory, log, lambda *_: None)
        pids = [at.pid for at in workers.locations]
        driver.clock = clock = RecordingClock(driver.schedule, pids)
        for pid in pids:
            forget_peak(pid)
        try:
            driver.run(workers, None, 0)
            losses = [row["loss"] for row in read_rows(directory / METRICS) if "loss" in row]
        finally:
            shutil.rmtree(directory)
        peak = max(peak_bytes(pid) for pid in pids)
        return Block(clock.step_s, clock.device_cpu, losses, peak), DriverCost(*driver_share(clock, warm_up))

    def first_step_ratio(self, job: JobSpec, plan: Plan, data: Path, warm_up: int) -> float:
        """First step of fresh actors over a steady step of the same actors."""
        self.start(job, plan)
        block, _ = self.block(job, plan, data, warm_up)
        return block.step_s[0] / median(block.step_s[warm_up:])

    def stop(self) -> None:
        """End the actors and Ray."""
        if self.workers is not None:
            self.workers.stop()
        ray.shutdown()


# What the driver costs: its processor time a step, and how long a device stands still between two steps because of
# it.
# Between its last task of one step and its first of the next a device reports to the driver, takes up the next call,
# posts its receives. The first task may also wait for another device's message; that wait is the schedule's and is
# left out: the gap counts from the later of the device's own last task and the end of the task that feeds it.

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
