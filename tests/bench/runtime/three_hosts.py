"""Train on three hosts with two devices each, whose links have 1 Gb/s and 2 ms and whose clocks are a day apart.

    python -m tests.bench.runtime.three_hosts [--only NAME ...] [--steps 20] [--json FILE]

The hosts are network namespaces of this machine (``tests.hosts``); it takes root. Every plan trains a small model for
real, in float64, with tasks that last a set time, so that two cores carry six devices and a task takes what it should.
For each plan the table has: the largest difference of its losses from a plain PyTorch loop in one process (at most
1e-9), whether rank after rank fills host after host, the step expected from the tasks' set times and the link, the step
the run predicts of itself after its first steps, and the measured median of the later ones (both within 10 % of it).
*Host* is the time per task that, added to all tasks, would make the expected step the measured one: what the hosts take
between two tasks, which the set times leave out. Exit status 1 if something does not hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from raypipe.data import known_fields
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.plan.online.better_order import step_seconds
from raypipe.runtime.emulation.emulated_worker import wait_until
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.runner import Handler
from raypipe.runtime.worker.worker import StageWorker
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.lowering.programs import Action
from tests.bench.command import options, write_rows
from tests.hosts import hosts, ray_cluster
from tests.job_files import write_text
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.small_runs import job_for, new_driver, own_workers

HOSTS, PER_HOST = 3, 2
RATE, BYTES_PER_S, DELAY_S = "1gbit", 125e6, 0.002
DAY = 86_400
CLOCKS_S = (DAY, 0, 2 * DAY)
"""So the second host's clock is a day behind the first one's, and the third's a day ahead."""
MODEL = {"type": "gpt", "layers": 12, "hidden": 32, "heads": 2, "sequence": 32, "vocabulary": 256, "dropout": 0.1}
BATCH, MICROBATCH = 12, 1
TASK_S = 0.05
"""Of a sixth of the model's forward; its input gradient and its weight gradient take as long each."""
HOP_S = 0.0005
"""Of a message inside a host."""
LONGER_S = 0.001
FIRST = 11
"""Steps at the start that the run's own prediction is made from."""
LIMIT, LOSS_LIMIT = 0.10, 1e-9
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "stages": 6},
    "chimera": {"schedule": "chimera", "stages": 6},
    "zb-v": {"schedule": "zb-v", "stages": 6},
    "tensor": {"schedule": "1f1b", "stages": 3, "tensor": 2},
    "copies": {"schedule": "1f1b", "stages": 3, "replicas": 2},
}


@dataclass(slots=True)
class Found:
    """What became of one plan."""

    losses: list[float]
    plain: list[float]
    nodes: list[str]
    """Per rank, the node."""
    expected_s: float
    predicted_s: float
    expected_longer_s: float
    """As ``expected_s``, with every task ``LONGER_S`` longer."""
    steps_s: list[float] = field(default_factory=list)
    setup_s: float = 0.0

    @property
    def measured_s(self) -> float:
        """Median of the steps after the prediction."""
        return median(self.steps_s[FIRST:])

    @property
    def loss_difference(self) -> float:
        """The largest one."""
        return max(abs(a - b) for a, b in zip(self.losses, self.plain, strict=True))

    @property
    def in_order(self) -> bool:
        """Whether each host holds ``PER_HOST`` ranks in a row."""
        rows = [self.nodes[i : i + PER_HOST] for i in range(0, len(self.nodes), PER_HOST)]
        return all(len(set(row)) == 1 for row in rows) and len({row[0] for row in rows}) == len(rows)

    def off(self, seconds: float) -> float:
        """How far a step of ``seconds`` is from the measured one."""
        return seconds / self.measured_s - 1

    @property
    def host_s(self) -> float:
        """Time per task that the expected step lacks."""
        return (self.measured_s - self.expected_s) / (self.expected_longer_s - self.expected_s) * LONGER_S

    @property
    def holds(self) -> bool:
        """Everything that is claimed."""
        near = all(abs(self.off(s)) <= LIMIT for s in (self.expected_s, self.predicted_s))
        return near and self.in_order and len(self.losses) > 0 and self.loss_difference <= LOSS_LIMIT


class PacedExecutor(Executor):
    """Computes for real, and then waits until the task has lasted as long as it should."""

    seconds: dict[str, float]
    """Per kind of task, for a whole micro-batch."""
    size: float

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.surround(_paced)

    def task_s(self, task: Task) -> float:
        """How long a task lasts at least."""
        return self.seconds.get(task.kind, 0.0) * len(task.mbs) * self.size


def _paced(handler: Handler) -> Handler:
    def run(executor: PacedExecutor, action: Action) -> None:
        begun = time.monotonic()
        handler(executor, action)
        if executor.training:
            wait_until(begun + executor.task_s(action.task))

    return run


class PacedWorker(StageWorker):
    """A worker whose tasks last a set time."""

    executor_class = PacedExecutor

    def set_pace(self, seconds: dict[str, float], size: float) -> None:
        """Set the seconds of each kind of task, and the share of a micro-batch that one id stands for."""
        PacedExecutor.seconds, PacedExecutor.size = seconds, size


def job_of(name: str, text: Path, steps: int) -> JobSpec:
    """The job of one plan; updates are not clipped, so nobody waits for a norm."""
    parallel = {"microbatch": MICROBATCH, **CASES[name]}
    return job_for({**MODEL, "tie_embeddings": False}, text, parallel, steps=steps, batch=BATCH)


def costs_for(schedule: Schedule, tensor: int) -> CostTable:
    """The set times, and the link's where two devices are on different hosts."""
    task_s = TASK_S * HOSTS * PER_HOST / tensor / schedule.stages
    nbytes = MICROBATCH * MODEL["sequence"] * MODEL["hidden"] * 8
    between_s = DELAY_S + nbytes / BYTES_PER_S + HOP_S
    down = schedule.placement[0]
    comm = [HOP_S if a * tensor // PER_HOST == b * tensor // PER_HOST else between_s for a, b in pairwise(down)]
    return CostTable.even(schedule.stages, task_s, task_s, task_s, comm=tuple(comm))


def longer(costs: CostTable) -> CostTable:
    """The same costs with every task ``LONGER_S`` longer."""
    kinds = ("forward", "input_grad", "weight_grad")
    return replace(costs, **{kind: tuple(t + LONGER_S for t in getattr(costs, kind)) for kind in kinds})


def inside(name: str, folder: Path, steps: int) -> Found:
    """Train one plan; this runs on the first host."""
    import ray

    job = job_of(name, folder / "text", steps)
    directory = folder / name
    driver = new_driver(job, directory)
    schedule = driver.schedule
    costs = costs_for(schedule, job.parallel.tensor)
    with own_workers(driver, PacedWorker) as workers:
        by_kind = {"F": costs.forward, "B": costs.input_grad, "W": costs.weight_grad}
        pace = {kind: times[0] for kind, times in by_kind.items()}
        pace["BW"] = pace["B"] + pace["W"]
        ray.get(workers.call("set_pace", pace, float(schedule.size)))
        begun = time.monotonic()
        driver.run(workers, None, 0)
        setup_s = time.monotonic() - begun
    rows = [row for row in read_rows(directory / METRICS) if "loss" in row]
    events = read_rows(directory / EVENTS)
    (started,) = (event for event in events if event["event"] == "started")
    (predicted,) = (event for event in events if event["event"] == "predicted")
    assert known_fields(directory / "data") is None  # bytes: what the plain loop reads
    return Found(
        [row["loss"] for row in rows], plain_losses(job, directory / "data", steps),
        [device["node"] for device in started["devices"]], step_seconds(schedule, costs, clips=False, ahead=False),
        predicted["step_s"], step_seconds(schedule, longer(costs), clips=False, ahead=False),
        [row["step_s"] for row in rows], setup_s - sum(row["step_s"] for row in rows),
    )  # fmt: skip


def show(name: str, one: Found) -> None:
    """Print a row of the table."""
    print(
        f"{name:9} {one.loss_difference:13.1e} {'yes' if one.in_order else 'no':>8} "
        f"{one.expected_s:7.3f} ({one.off(one.expected_s):+6.1%}) {one.predicted_s:7.3f} "
        f"({one.off(one.predicted_s):+6.1%}) {one.measured_s:7.3f} s {one.host_s * 1e3:5.1f} ms "
        f"{one.setup_s:5.1f} s",
        flush=True,
    )


def main() -> int:
    args = options(__doc__, only=CASES, steps=20, json=Path, inside=Path)
    if args.inside is not None:
        one = inside(args.only[0], args.inside, args.steps)
        shown = {name: getattr(one, name) for name in Found.__slots__}
        (args.inside / f"{args.only[0]}.json").write_text(json.dumps(shown))
        return 0
    result: dict[str, Found] = {}
    print(
        f"{'plan':9} {'losses differ':>13} {'in order':>8} {'expected':>17} {'predicted':>17} {'measured':9} "
        f"{'host':>8} {'rest':>7}"
    )
    with (
        tempfile.TemporaryDirectory(prefix="raypipe-hosts-") as name,
        hosts(HOSTS, rate=RATE, delay_s=DELAY_S, clock_offsets_s=CLOCKS_S) as members,
        ray_cluster(members, cpus=PER_HOST) as settings,
    ):
        folder = Path(name)
        write_text(folder / "text")
        for case in args.only:
            words = [sys.executable, "-m", "tests.bench.runtime.three_hosts", "--inside", name, "--only", case]
            done = members[0].run(*words, "--steps", str(args.steps), **settings)
            if done.returncode:
                print(f"{case}: {done.stderr[-4000:]}", file=sys.stderr)
                return 1
            result[case] = Found(**json.loads((folder / f"{case}.json").read_text()))
            show(case, result[case])
    write_rows(args.json, {name: {key: getattr(one, key) for key in Found.__slots__} for name, one in result.items()})
    return 0 if all(one.holds for one in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
