"""Kill the driver, then Ray Train's controller, in the middle of runs on a cluster without a CPU to spare.

    python -m tests.bench.runtime.kill_driver [--trials 10] [--json FILE]

Every trial is a run of its own on two CPUs, one after another on the same Ray: what one leaves behind, the next one
lacks. Prints the seconds from each kill to the next step done; exit status 1 if a run fails or its losses differ from
the undisturbed run's.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench.command import options, write_rows
from tests.job_files import write_text
from tests.ray_environment import start_ray
from tests.runtime.runs.killing import CONTROLLER, DRIVER, job_to_kill, run_killing


def main() -> int:
    args = options(__doc__, trials=10, steps=200, json=Path)
    os.environ["RAY_ADDRESS"] = start_ray(2, forks=False)
    seconds: dict[str, list[float]] = {DRIVER: [], CONTROLLER: []}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="raypipe-kill-") as folder:
        job = job_to_kill(Path(folder) / "job.yaml", write_text(Path(folder) / "text"), args.steps)
        undisturbed = run_killing((), job, Path(folder) / "undisturbed", root=os.getpid())
        if undisturbed.status != 0:
            print(undisturbed.said, file=sys.stderr)
            return 1
        for trial in range(args.trials):
            for title, result in seconds.items():
                directory = Path(folder) / f"{title.partition('::')[2]}-{trial}"
                done = run_killing((title,), job, directory, root=os.getpid())
                same = done.result.get("losses") == undisturbed.result["losses"]
                result.append(done.seconds)
                print(
                    f"{title} {trial + 1}: status {done.status}, same losses: {same}, {done.seconds:.1f} s", flush=True
                )
                if not same:
                    failed += 1
                    print(done.said, file=sys.stderr)
    for title, result in seconds.items():
        print(
            f"{title}: {len(result)} kills, next step after {statistics.median(result):.1f} s, most {max(result):.1f} s"
        )
    write_rows(args.json, seconds)
    print(f"{failed} of {sum(map(len, seconds.values()))} runs failed or lost something")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
