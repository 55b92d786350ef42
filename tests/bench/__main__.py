"""raypipe beside torch, DeepSpeed, accelerate and a single process: ``python -m tests.bench``.

All contenders start from the same weights and see the same samples, micro-batches, optimizer and threads. One of them
runs at a time, the others sleep; every round gives each its turn. Exits with 1 if any losses disagree.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
import torch
from rich.console import Console

from tests.bench.head_to_head.cases import CASES, SHARED, UNCUT
from tests.bench.head_to_head.raypipe_side import RaypipeSide
from tests.bench.head_to_head.rounds import rivals, run_case
from tests.bench.head_to_head.table import show, summarise


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, measures little")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", choices=[*SHARED, *UNCUT], default=[*SHARED, *UNCUT])
    parser.add_argument("--pipelines-only", action="store_true", help="leave out DDP and the two-thread process")
    parser.add_argument("--compiled", action="store_true", help="raypipe with compiled stages too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    return parser.parse_args()


def machine() -> dict[str, object]:
    """What the figures were measured on and with."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "torch": torch.__version__, "ray": ray.__version__, "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)), "processor": model, "threads_per_device": 1,
    }  # fmt: skip


def main() -> int:
    args = arguments()
    faulthandler.register(signal.SIGUSR1)
    out, progress = Console(width=160), Console(stderr=True)
    about = machine()
    out.print(" · ".join(f"{key.replace('_', ' ')} {value}" for key, value in about.items()), highlight=False)
    rounds = 1 if args.quick else args.rounds
    # Checkpoints and data go to memory: writing them back to a disk would disturb whoever runs next.
    memory = Path("/dev/shm")
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="raypipe-bench-", dir=memory if memory.is_dir() else None) as name,
        rivals(Path(name)) as others,
    ):
        side = RaypipeSide(Path(name))
        # Stopped from outside, it still ends Ray and the rivals and removes its files. After Ray's start, which
        # brings a handler of its own.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            for key in args.case:
                case = CASES[key]
                case = replace(case, schedules=tuple(s for s in case.schedules if s in args.schedules))
                if args.quick:
                    case = replace(case, steps=case.warm_up + 2)
                if not case.schedules:
                    continue
                say = partial(progress.print, style="dim")
                result = run_case(case, side, others, Path(name), rounds, say, args.pipelines_only, args.compiled)
                if not result.blocks:
                    for schedule, why in result.skipped.items():
                        out.print(f"left out: {key} {schedule}: {why}", markup=False)
                    continue
                figures.append(summarise(result))
                show(figures[-1], out)
                if args.json:  # after each case: a later one may fail
                    text = json.dumps({"machine": about, "cases": figures}, indent=1)
                    args.json.write_text(text + "\n", encoding="utf-8")
        finally:
            side.stop()
    return 0 if all(f["losses_agree"] for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
