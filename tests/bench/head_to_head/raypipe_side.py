"""raypipe's side: the real driver and stage actors on a local Ray, one block at a time."""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import ray

from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.group.worker_group import WorkerGroup, start_worker_group
from raypipe.runtime.hosts.reserve import reserve
from tests.bench.head_to_head.blocks import Block
from tests.bench.head_to_head.cases import DEVICES
from tests.bench.head_to_head.dispatch import RecordingClock, driver_share


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
        self.workers = start_worker_group(
            schedule, plan.parallel.replicas, reserve(schedule.devices, self._request, 120.0)
        )

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
        driver.clock = clock = RecordingClock(driver.schedule, [at.pid for at in workers.locations])
        try:
            driver.run(workers, None, 0)
            losses = [row["loss"] for row in read_rows(directory / METRICS) if "loss" in row]
        finally:
            log.close()
            shutil.rmtree(directory)
        return Block(clock.step_s, clock.device_cpu, losses), DriverCost(*driver_share(clock, warm_up))

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
