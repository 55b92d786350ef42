"""Whether a profile notices that it was disturbed.

Run: ``python -m tests.bench.accuracy.noisy_profile``. Wants a quiet machine.

The same profile is measured alone, beside a process that computes all the time on every core, and beside such processes
that begin when it is half through. The first must bring no warning, the other two must. Shown beside: how far the
disturbed profiles' times are from the quiet one's. ``--thorough`` measures as ``raypipe profile`` does, not as
``parallel: auto``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import ray
from rich.console import Console

from raypipe.cost.profile import Profile
from raypipe.data import prepare
from raypipe.job.spec import JobSpec, job_from
from raypipe.profiling.profile_job import measure_profile
from raypipe.runtime.cluster.connect import connect
from tests.bench.command import options
from tests.bench.turns import table

MODEL = {"type": "gpt", "layers": 8, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 256, "dropout": 0.0}
SIZES = (2, 4, 8)


class Burners:
    """Processes that compute for ever, ``after_s`` seconds after the measuring began.

    Not before: Ray starts actors at low priority, which would then never come up.
    """

    def __init__(self, count: int, after_s: float) -> None:
        self.code = f"import time; time.sleep({after_s})\nwhile True: pass"
        self.count = count
        self.processes: list[subprocess.Popen[bytes]] = []
        self.began = 0.0

    def heard(self, text: str) -> None:
        """Begin when the profile says that it measures."""
        if text.startswith("micro-batches of") and not self.began:
            self.began = time.monotonic()
            self.processes = [subprocess.Popen([sys.executable, "-c", self.code]) for _ in range(self.count)]

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


def job() -> JobSpec:
    """Of the other benches' size."""
    return job_from(
        {
            "name": "noisy", "model": {**MODEL, "tie_embeddings": False}, "data": {"type": "bytes", "path": "stdlib"},
            "train": {"steps": 1, "batch": 32}, "parallel": {"microbatch": 4},
        }
    )  # fmt: skip


def furthest(profile: Profile, quiet: Profile) -> float:
    """The largest relative difference of a layer's forward or backward."""
    pairs = [
        (getattr(a.times[n], task), getattr(b.times[n], task))
        for a, b in zip(profile.layers, quiet.layers, strict=True)
        for n in b.times
        for task in ("forward", "joint", "input_grad", "weight_grad")
        if b.times[n].forward > 1e-3  # an embedding is a few microseconds
    ]
    return max((a / b - 1 for a, b in pairs), key=abs)


def main() -> int:
    args = options(__doc__, thorough=False)
    os.environ.setdefault("RAY_ADDRESS", "local")
    progress = Console(stderr=True)
    cores = os.cpu_count() or 1
    result: dict[str, tuple[Profile, float]] = {}
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="raypipe-noisy-") as name:
        data = Path(name)
        prepare(job().data, MODEL["sequence"], data)
        connect(2)

        def say(text: str) -> None:
            progress.print(text, style="dim")

        def measure(label: str, count: int, after_s: float) -> None:
            say(label)
            burners = Burners(count, after_s)

            def heard(text: str) -> None:
                say(text)
                burners.heard(text)

            try:
                profile = measure_profile(job(), SIZES, 2, quick=not args.thorough, data=data, say=heard)
            finally:
                burners.stop()
            result[label] = profile, time.monotonic() - burners.began

        measure("quiet", 0, 0.0)
        took = result["quiet"][1]
        measure("a burner on every core", cores, 0.0)
        measure("burners from the middle on", cores, took / 2)
        measure("quiet again", 0, 0.0)
        ray.shutdown()
    quiet, rows = result["quiet"][0], []
    wrong = False
    for label, (profile, seconds) in result.items():
        noise = profile.noise
        rows.append((
            label, f"{noise.stolen:.1%}", f"{noise.drift:.1%}", str(noise.again), f"{seconds:.1f}",
            f"{furthest(profile, quiet):+.0%}", noise.warning() or "",
        ))  # fmt: skip
        wrong |= (noise.warning() is None) != ("quiet" in label)
    columns = ("while measuring", "stolen", "drift", "again", "seconds", "times off by up to", "warning")
    table("one profile, disturbed", columns, rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
