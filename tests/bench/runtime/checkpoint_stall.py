"""What a checkpoint costs the training, written beside it (``train.async_save``) and without that.

    python -m tests.bench.runtime.checkpoint_stall [--saves 5] [--steps-to-write 10] [--rounds 2]

A GPT in two stages on two CPUs. The storage is a model of a slow one: each worker writes its shard for real, then
sleeps until the bytes would have passed at a set rate, chosen so that a write takes ``--steps-to-write`` steps. The
stall of a save is the time from the end of the step before it to the end of the step after it, as the driver sees them,
less the median step; so it holds all that a save costs, not only what the workers report (``stall_s`` of events.jsonl).
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray

from raypipe.checkpoint import ShardInfo, Snapshot, write_snapshot
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.worker.worker import StageWorker
from tests.bench.command import options
from tests.runtime.runs.small_runs import job_for, new_driver, own_workers

MODEL = {"type": "gpt", "layers": 8, "hidden": 384, "heads": 6, "sequence": 128, "vocabulary": 256, "dropout": 0.0}
WARM = 3
"""Steps at the start that are left out."""
RATE: dict[str, float] = {}
"""In a worker: bytes a second that the storage takes; none means that nobody waits."""


def write_slowly(folder: Path, name: str, snapshot: Snapshot) -> ShardInfo:
    """Write a shard, in no less time than the modelled storage takes."""
    began = time.monotonic()
    shard = write_snapshot(folder, name, snapshot)
    if "bytes_s" in RATE:
        time.sleep(max(0.0, began + shard.bytes / RATE["bytes_s"] - time.monotonic()))
    return shard


class SlowStorage(StageWorker):
    """A worker that writes at a set rate."""

    write_shard = staticmethod(write_slowly)

    def set_rate(self, bytes_s: float) -> None:
        """Set the rate of this worker's storage."""
        RATE["bytes_s"] = bytes_s


class TimedLog(RunLog):
    """Notes when each step was collected."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.at: dict[int, float] = {}

    def metric(self, row: dict[str, Any]) -> None:
        """See RunLog.metric."""
        super().metric(row)
        if "loss" in row:
            self.at[row["step"]] = time.monotonic()


@dataclass(frozen=True)
class Measured:
    """One run."""

    step_s: float
    """Median step with no save beside it."""
    beside_s: float
    """Median step while a checkpoint was being written beside it; ``step_s`` if none was."""
    stalls_s: list[float]
    """Per save but the last, the time it cost."""
    reported_s: list[float]
    """The same as the workers report it."""
    write_s: list[float]
    shard_bytes: int
    """Of the largest shard."""
    losses: list[float]


def run(folder: Path, steps: int, every: int, asynchronous: bool, bytes_s: float | None) -> Measured:
    """Train ``steps`` steps with a checkpoint every so many."""
    train = {
        "steps": steps, "lr": 0.001, "checkpoint_every": every, "async_save": asynchronous, "recovery": "restart",
        "dtype": "float32",
    }  # fmt: skip
    job = job_for(MODEL, {"type": "bytes", "path": "stdlib"}, {"schedule": "1f1b", "stages": 2}, **train)
    driver = new_driver(job, folder, log=TimedLog)
    log = driver.log
    assert isinstance(log, TimedLog)
    with own_workers(driver, SlowStorage) as workers:
        if bytes_s is not None:
            ray.get(workers.call("set_rate", bytes_s))
        driver.run(workers, None, 0)
    events = read_rows(folder / EVENTS)
    took = {step: at - log.at[step - 1] for step, at in log.at.items() if step - 1 in log.at}
    saves = [e for e in events if e["event"] == "checkpoint_begun" and e["step"] < steps]
    written = {e["step"]: e["write_s"] for e in events if e["event"] == "checkpoint"}
    after = {e["step"] + 1 for e in saves}
    beside: set[int] = set()
    if asynchronous:
        for save in saves:
            until = log.at[save["step"]] + written[save["step"]]
            beside |= {step for step in took if step > save["step"] + 1 and log.at[step] <= until}
    plain = median(s for step, s in took.items() if step > WARM and step not in after | beside)
    shards = [path.stat().st_size for path in folder.glob(f"checkpoints/step-{steps:08d}/*.safetensors")]
    return Measured(
        plain,
        median([took[step] for step in beside] or [plain]),
        [took[e["step"] + 1] - plain for e in saves],
        [e["stall_s"] for e in saves],
        [written[e["step"]] for e in saves],
        max(shards),
        [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row],
    )


def main() -> None:
    """Print one line per way."""
    asked = options(__doc__, saves=5, steps_to_write=10, rounds=2)
    every = asked.steps_to_write + 4
    with tempfile.TemporaryDirectory() as folder:
        first = run(Path(folder) / "first", 12, 0, True, None)
        bytes_s = first.shard_bytes / (asked.steps_to_write * first.step_s)
        print(
            f"a step takes {first.step_s:.3f} s; the larger shard has {first.shard_bytes / 1e6:.0f} MB, "
            f"the storage takes {bytes_s / 1e6:.1f} MB/s per worker"
        )
        result: dict[bool, list[Measured]] = {False: [], True: []}
        for number in range(asked.rounds):
            for way in result:
                place = Path(folder) / f"{number}-{way}"
                result[way].append(run(place, every * asked.saves + 2, every, way, bytes_s))
    for way, runs in result.items():
        step_s = median(one.step_s for one in runs)
        stalls = [s for one in runs for s in one.stalls_s]
        reported = [s for one in runs for s in one.reported_s]
        write_s = median(s for one in runs for s in one.write_s)
        beside_s = median(one.beside_s for one in runs)
        print(
            f"async_save: {str(way).lower():5}  step {step_s:.3f} s, "
            f"write {write_s:.2f} s = {write_s / step_s:.1f} steps, "
            f"stall {median(stalls):.4f} s = {median(stalls) / step_s:.1%} of a step (median of {len(stalls)} saves, "
            f"{min(stalls):.4f} to {max(stalls):.4f}; workers report {median(reported):.4f}), "
            f"a step beside a write {beside_s / step_s - 1:+.1%}"
        )
    curves = {tuple(one.losses) for runs in result.values() for one in runs}
    print("losses: the same in all runs" if len(curves) == 1 else "losses DIFFER")


if __name__ == "__main__":
    main()
