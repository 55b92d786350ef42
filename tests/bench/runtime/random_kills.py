"""Two hundred random kills in one go: workers, drivers, Ray Train's controllers and nodes.

    python -m tests.bench.runtime.random_kills [--share 1.0] [--only NAME ...]

Runs ``recoveries`` (workers of 1F1B, ZB-V, Chimera and ZeRO-3, two to four stages, with and without replicas and
processes that stand by), ``kill_driver`` and ``device_changes`` (raylets), one after another, and adds up what they
found. ``--share`` kills so much of the two hundred. Exit status 1 if a run failed, or lost or left out something.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

STANDBY_STEPS, STARTED_STEPS = 450, 100
"""Steps per kill of a run with and without a process that stands by, which limit how long a kill can be waited for."""


@dataclass(frozen=True)
class Series:
    """Kills of one kind."""

    name: str
    kills: int
    command: Callable[[int], list[str]]
    """The bench and its options, from the number of kills."""
    seconds: Callable[[Any], list[float]]
    """From what the bench wrote, the seconds from each kill to the next step done."""


def workers(name: str, shapes: tuple[str, ...], kills: int, steps: int, *options: str) -> Series:
    """Kills of workers, ``kills`` in all, in one run per shape."""

    def command(number: int) -> list[str]:
        each = max(1, round(number / len(shapes)))
        return ["recoveries", "--shape", *shapes, "--kills", str(each), "--steps", str(each * steps), *options]

    return Series(name, kills, command, lambda runs: [second for run in runs for second in run["seconds"]])


SERIES = (
    workers(
        "in place, a process stood by", ("1f1b:2x2", "zb-v:2x2", "chimera:4x1"), 18, STANDBY_STEPS, "--standby", "1"
    ),
    workers("in place, a process had to start", ("1f1b:2x2", "zb-v:2x2", "chimera:2x2"), 72, STARTED_STEPS),
    workers("from copies", ("1f1b:2x1", "zb-v:2x1", "1f1b:4x1", "1f1b:2x2:zero3"), 60, STARTED_STEPS),
    Series(
        "driver, Ray Train's controller", 40, lambda n: ["kill_driver", "--trials", str(max(1, n // 2))],
        lambda found: [second for one in found.values() for second in one],
    ),
    Series(
        "raylet", 10, lambda n: ["device_changes", "--rounds", str(max(1, n))],
        lambda rows: [row["seconds"] for row in rows if row["what"] == "a node is killed"],
    ),
)  # fmt: skip


def main() -> int:
    """Run the series; print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.runtime.random_kills", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", choices=[one.name for one in SERIES])
    asked = parser.parse_args()
    table = Table("killed", "kills", "next step after, s (median)", "most", "minutes", "")
    failed, total = [], 0
    for one in SERIES:
        if asked.only and one.name not in asked.only:
            continue
        print(f"{one.name}:", flush=True)
        begun = time.monotonic()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            bench, *options = one.command(round(one.kills * asked.share))
            command = [sys.executable, "-m", f"tests.bench.runtime.{bench}", *options, "--json", file.name]
            status = subprocess.run(command).returncode
            written = Path(file.name).read_text()
        seconds = one.seconds(json.loads(written)) if written else []
        total += len(seconds)
        if status or not seconds:
            failed.append(one.name)
        table.add_row(
            one.name, str(len(seconds)), *([f"{median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["", ""]),
            f"{(time.monotonic() - begun) / 60:.0f}", "failed" if status else "all sound",
        )  # fmt: skip
    Console().print(table)
    print(f"{total} kills; " + (f"failed: {', '.join(failed)}" if failed else "every run finished, none lost anything"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
