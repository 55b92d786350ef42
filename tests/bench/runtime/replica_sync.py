"""Ways to sum gradients over two replicas that a slow link joins: pure data parallelism on two hosts, in real training.

    python -m tests.bench.runtime.replica_sync [--rate 1gbit] [--rounds 2] [--layer-ms 30] [--first-k K]

The hosts are network namespaces of this machine (``tests.hosts``) with a process each; it takes root. Every row trains
the same small GPT of 100 MB in float32 on the same workers, one row after the other, in several rounds. Sequences are
short, and each layer's forward, input gradient and weight gradient lasts ``--layer-ms`` longer than it computes, so
that a busy machine does not decide (0: as they compute). ``after backward`` is no setting: it holds buckets back until
the last backward has ended, which is what papers call lazy; ``lazy`` of a job begins them in it, for the stage's sum
follows at once. A step lasts from the end of one to the end of the next on the workers' clock; the table has the median
of all rounds' later steps, their quartiles, the median against ``wait-free``, and the largest difference of losses from
it. ``reverse-first-k`` chooses k for itself, and its steps count from when it has, unless ``--first-k`` gives one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from raypipe.data import declared_fields, prepare_data
from raypipe.job.load import job_from
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.online.tune_first_k import JUDGE_AT
from raypipe.runtime.backward.deferred import Closure
from raypipe.runtime.driver import Driver
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.update.buckets import BucketedAllReduce
from raypipe.runtime.update.gradients import GradientSync, StageKey
from raypipe.runtime.worker.worker import StageWorker
from raypipe.train import make_plan
from tests.bench.runtime.kill_driver import text_in
from tests.hosts import hosts, ray_cluster

MODEL = {"type": "gpt", "layers": 8, "hidden": 512, "heads": 8, "sequence": 8, "vocabulary": 256, "dropout": 0.0}
AFTER, AGAINST, POSTPONED = "after backward", "wait-free", "reverse-first-k"
ROWS = (AFTER, "lazy", AGAINST, "prioritised", POSTPONED)
WARM_UP, MEASURED = 4, 10
"""Steps of a row: those before its order of sums has settled, and those that count."""


class HeldSync(GradientSync):
    """Sums whose buckets may be held back until the last backward has ended."""

    held = False

    def early(self, key: StageKey) -> BucketedAllReduce | None:
        """See GradientSync.early."""
        return None if self.held else super().early(key)


class BenchWorker(StageWorker):
    """A worker that can hold buckets back, and says what k it has come to."""

    sync_class = HeldSync
    layer_s = 0.0

    def setup(self, setup: Setup) -> tuple[int, list[str]]:
        """See StageWorker.setup."""
        made = super().setup(setup)
        for key, module in self.modules.items():
            for number, block in enumerate(module.body.blocks):
                block.register_forward_pre_hook(lambda *_: time.sleep(self.layer_s))
                block.register_full_backward_pre_hook(partial(self._pace, key, number))
        postponed = self.executor.postponed
        postponed.sort = partial(self._sort, postponed.sort)  # type: ignore[method-assign]
        return made

    def _pace(self, key: StageKey, layer: int, *_: object) -> None:
        time.sleep(self.layer_s * (1 if layer < self.executor.sync.first_k.get(key, 0) else 2))

    def _sort(self, sort: Callable[[StageKey, list[Closure]], None], key: StageKey, closures: list[Closure]) -> None:
        """Sort, and let the first weight gradient of each postponed layer last longer."""
        sort(key, closures)
        layer_of = {p: n for n, layer in enumerate(self.modules[key].trained_by_block) for p in layer}
        seen: set[int] = set()
        for at, one in enumerate(closures):
            layer = layer_of[one.parameters[0]]  # type: ignore[index]
            if layer not in seen:
                seen.add(layer)
                closures[at] = one._replace(compute=partial(self._longer, one.compute))

    def _longer(self, compute: Callable[[], None]) -> None:
        time.sleep(self.layer_s)
        compute()

    def pace(self, layer_s: float) -> None:
        """Let each layer's tasks last so much longer."""
        self.layer_s = layer_s

    def hold_back(self, held: bool) -> None:
        """Hold buckets back from now on, or not."""
        HeldSync.held = held

    def first_k(self) -> list[int]:
        """How many layers' weight gradients each stage postpones."""
        return list(self.executor.sync.first_k.values())


def job_of(row: str, text: Path, first_k: int | None) -> JobSpec:
    """The job of one row."""
    warm_up = JUDGE_AT + 2 if row == POSTPONED and first_k is None else WARM_UP
    sync: dict[str, Any] = {"sync": "lazy" if row == AFTER else row}
    if row == POSTPONED:
        sync["first_k"] = first_k
    return job_from(
        {
            "name": "replica-sync", "model": {**MODEL, "tie_embeddings": False},
            "data": {"type": "bytes", "path": str(text)},
            "train": {"steps": warm_up + MEASURED, "batch": 8, "lr": 0.001, "seed": 3, "eval_batches": 1},
            "parallel": {"schedule": "1f1b", "stages": 1, "replicas": 2, "microbatch": 4, **sync},
        }
    )  # fmt: skip


def inside(folder: Path, rounds: int, first_k: int | None, layer_s: float) -> dict[str, Any]:
    """Train all rows; this runs on the first host."""
    import ray

    from raypipe.runtime.cluster.connect import connect
    from raypipe.runtime.group.worker_group import start_worker_group

    found: dict[str, Any] = {row: {"steps_s": [], "losses": [], "k": []} for row in ROWS}
    workers = None
    try:
        for number in range(rounds):
            for row in ROWS if number % 2 == 0 else ROWS[::-1]:
                job = job_of(row, folder / "text", first_k)
                directory = folder / f"{row} {number}".replace(" ", "-")
                directory.mkdir()
                prepare_data(job, build_model(job, declared_fields(job.data)).task, directory / "data")
                log = RunLog(directory)
                driver = Driver(job, make_plan(job), directory, log, lambda *_: None)
                if workers is None:
                    workers = start_worker_group(driver.schedule, 2, connect(2), BenchWorker)
                locations = ray.get(workers.call("locate"))  # a fresh port for every set-up
                workers = replace(workers, locations=locations, run_id=uuid.uuid4().hex[:8])
                ray.get(workers.call("hold_back", row == AFTER) + workers.call("pace", layer_s))
                driver.run(workers, None, 0)
                log.close()
                rows = [one for one in read_rows(directory / METRICS) if "loss" in one]
                found[row]["steps_s"] += [one["step_s"] for one in rows[-MEASURED:]]
                found[row]["losses"] = [one["loss"] for one in rows]
                found[row]["k"] += ray.get(workers.call("first_k"))[0]
    finally:
        if workers is not None:
            workers.stop()
    return found


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    usual = found[AGAINST]
    print(f"{'sums':16} {'step':>9} {'quartiles':>17} {'against':>8} {'losses differ':>14}  k")
    for row, one in found.items():
        low, middle, high = quantiles(one["steps_s"], n=4)
        off = max(abs(a - b) for a, b in zip(one["losses"], usual["losses"], strict=False))
        print(
            f"{row:16} {middle * 1e3:6.0f} ms {low * 1e3:7.0f} {high * 1e3:6.0f} ms "
            f"{middle / median(usual['steps_s']):7.3f} {off:14.1e}  {', '.join(map(str, one['k']))}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.runtime.replica_sync", description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layer-ms", type=float, default=30.0)
    parser.add_argument("--first-k", type=int, metavar="K")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        found = inside(args.inside, args.rounds, args.first_k, args.layer_ms * 1e-3)
        (args.inside / "found.json").write_text(json.dumps(found))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="raypipe-sync-") as name,
        hosts(2, rate=args.rate) as members,
        ray_cluster(members) as settings,
    ):
        text_in(Path(name))
        words = [sys.executable, "-m", "tests.bench.runtime.replica_sync", "--inside", name]
        words += ["--rounds", str(args.rounds), "--layer-ms", str(args.layer_ms)]
        words += [] if args.first_k is None else ["--first-k", str(args.first_k)]
        done = members[0].run(*words, timeout_s=3600.0, **settings)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            return 1
        found = json.loads((Path(name) / "found.json").read_text())
    show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
