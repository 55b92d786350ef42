"""One case of the head-to-head in several checkouts of raypipe, in turn.

    python -m tests.bench.head_to_head.checkouts --case overhead OLDER_CHECKOUT . .:compiled

A contender is a folder with a checkout, and ``:compiled`` where its stages run compiled. Each checkout has a process
with a Ray and a pair of stage actors of its own; one runs at a time, and each gets its turn in every round. Ratios are
paired within a round, over the first contender.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

COMPILED = ":compiled"


class Side:
    """The process of one checkout. It runs that checkout's own copy of this file, since names of raypipe move."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(checkout / "tests/bench/head_to_head/checkouts.py"), "--answer"], cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def block(self, case: str, schedule: str, compiled: bool, steps: int) -> dict[str, float]:
        """Run a block; return its step time and processor time in milliseconds, and its last loss."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([case, schedule, compiled, steps]), file=self._process.stdin, flush=True)
        result: dict[str, float] = json.loads(self._process.stdout.readline())
        return result

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()


def answer() -> None:
    """Run the blocks that standard input asks for; what Ray prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from raypipe.data import prepare
    from raypipe.train import make_plan
    from tests.bench.head_to_head.cases import CASES
    from tests.bench.head_to_head.raypipe_side import RaypipeSide

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-", dir=memory if memory.is_dir() else None) as name:
        side = RaypipeSide(Path(name))
        try:
            for line in sys.stdin:
                key, schedule, compiled, steps = json.loads(line)
                case, data = CASES[key], Path(name) / f"data-{key}"
                job = case.job(schedule, case.warm_up + steps)
                if not data.exists():
                    prepare(job.data, job.model.sequence, data)
                plan = make_plan(job)
                if compiled:
                    train = job.train.model_copy(update={"compile": "inductor", "compile_first": True})
                    job = job.model_copy(update={"train": train})
                block, _ = side.block(job, plan, data, case.warm_up)
                result = {"ms": 1e3 * block.steady(case.warm_up), "cpu_ms": 1e3 * block.work(case.warm_up)}
                print(json.dumps({**result, "loss": block.losses[-1]}), file=out, flush=True)
        finally:
            side.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="+", metavar="CHECKOUT[:compiled]")
    parser.add_argument("--case", default="overhead")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a turn")
    asked = parser.parse_args()
    folders = {one: Path(one.removesuffix(COMPILED)).resolve() for one in asked.contenders}
    sides = {folder: Side(folder) for folder in dict.fromkeys(folders.values())}

    def turn(contender: str, schedule: str, steps: int) -> dict[str, float]:
        return sides[folders[contender]].block(asked.case, schedule, contender.endswith(COMPILED), steps)

    try:
        for schedule in asked.schedules:
            result: dict[str, list[dict[str, float]]] = {one: [] for one in asked.contenders}
            for one in asked.contenders:
                turn(one, schedule, 4)  # it compiles
            for number in range(asked.rounds):
                for one in asked.contenders[:: -1 if number % 2 else 1]:
                    result[one].append(turn(one, schedule, asked.steps))
            first = result[asked.contenders[0]]
            for one, blocks in result.items():
                ms, cpu = (median(block[key] for block in blocks) for key in ("ms", "cpu_ms"))
                over = [median(a[key] / b[key] for a, b in zip(blocks, first, strict=True)) for key in ("ms", "cpu_ms")]
                print(f"{schedule:6} {one:40} {ms:7.2f} ms  {over[0]:.3f}   processor time {cpu:6.2f} ms  "
                      f"{over[1]:.3f}   loss {blocks[-1]['loss']:.6f}", flush=True)  # fmt: skip
    finally:
        for side in sides.values():
            side.stop()


if __name__ == "__main__":
    answer() if sys.argv[1:] == ["--answer"] else main()
