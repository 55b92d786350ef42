"""Where a step's processor time goes on each device, per task: ``python -m tests.bench.where --case overhead``.

Times are the executor thread's processor time, so that a busy machine does not enter; waiting costs none. The stage
actors run an executor that reads that clock around each of its parts, which itself costs under a microsecond each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from raypipe.data import prepare
from raypipe.runtime.executor import Executor
from raypipe.runtime.step import StepResult
from raypipe.train import make_plan
from tests.bench.cases import CASES, SHARED
from tests.bench.raypipe_side import RaypipeSide

PARTS = ("receive", "_send", "_forward", "_backward", "_weights", "before_updates", "_update", "_end")
"""Parts of a step that don't contain one another."""
INSIDE = ("_compute", "_inputs")
"""Parts of ``_forward``; what is left of it is the bookkeeping around the layers."""


class MeteredExecutor(Executor):
    """Adds up the processor time of each part, after the steps that are left out."""

    warm_up = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.steps = 0
        self.metering = True
        for part in (*PARTS, *INSIDE):
            setattr(self, part, self._metered(part, getattr(self, part)))
        for module in self.modules.values():
            module.run_backward = self._metered("run_backward", module.run_backward)

    def _metered(self, part: str, function: Any) -> Any:
        def metered(*args: Any, **named: Any) -> Any:
            if not self.metering:
                return function(*args, **named)
            start = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                self.seconds[part] += time.thread_time() - start
                self.calls[part] += 1

        return metered

    def run(self, *args: Any, **named: Any) -> StepResult:
        if "split" in named:  # validation is no part of a step
            self.metering = False
            return super().run(*args, **named)
        if self.steps == type(self).warm_up:
            self.seconds.clear()
            self.calls.clear()
            self.first = time.thread_time(), time.process_time(), time.monotonic()
        self.steps += 1
        start = time.thread_time()
        result = super().run(*args, **named)
        self.seconds["run"] += time.thread_time() - start
        self.last = time.thread_time(), time.process_time(), time.monotonic()
        return result


def install(stage: Any, warm_up: int) -> None:
    """Runs in a stage actor, before its setup: the executor it will make is a metered one."""
    import raypipe.runtime.worker as module

    MeteredExecutor.warm_up = warm_up
    module.Executor = MeteredExecutor


def read(stage: Any) -> tuple[dict[str, float], dict[str, int], int, list[float]]:
    """Runs in a stage actor: seconds and calls per part, steps, and (thread, process, wall) seconds of all steps."""
    e = stage.executor
    spans = [b - a for a, b in zip(e.first, e.last, strict=True)]
    return dict(e.seconds), dict(e.calls), e.steps - type(e).warm_up, spans


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.where", description=__doc__)
    parser.add_argument("--case", choices=CASES, default="overhead")
    parser.add_argument("--schedule", choices=SHARED, default="1f1b")
    parser.add_argument("--steps", type=int, default=0, help="default: three blocks of the case")
    args = parser.parse_args()
    case = CASES[args.case]
    job = case.job(args.schedule, args.steps or 3 * case.steps)
    plan = make_plan(job)
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-") as name:
        data = Path(name) / "data"
        prepare(job.data, job.model.sequence, data)
        side = RaypipeSide(Path(name))
        try:
            side.start(job, plan)
            assert side.workers is not None
            ray.get([actor.__ray_call__.remote(install, case.warm_up) for actor in side.workers.actors])
            block, _ = side.block(job, plan, data, case.warm_up)
            readings = ray.get([actor.__ray_call__.remote(read) for actor in side.workers.actors])
        finally:
            side.stop()
    print(f"{case.name}, {args.schedule}: median step {block.steady(case.warm_up) * 1e3:.1f} ms")
    for device, (seconds, calls, steps, (thread, process, wall)) in enumerate(readings):
        print(f"\ndevice {device}, processor time over {steps} steps; a step: {wall / steps * 1e3:.1f} ms of wall time")
        inside = sum(seconds.get(part, 0.0) for part in PARTS)
        rows = [(part, seconds[part], calls[part]) for part in (*PARTS, *INSIDE, "run_backward") if part in seconds]
        rows += [
            ("between the parts", seconds["run"] - inside, steps),
            ("between two runs", thread - seconds["run"], steps),
            ("other threads", process - thread, steps),
        ]
        for part, total, count in rows:
            print(
                f"  {part:18}{total / count * 1e6:9.1f} us x{count / steps:5.1f} a step = {total / steps * 1e3:8.3f} ms"
            )


if __name__ == "__main__":
    main()
