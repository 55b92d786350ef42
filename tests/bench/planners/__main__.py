"""What raypipe chooses, beside what others would take: ``python -m tests.bench.planners [--cases N] [--json FILE]``.

``--cases``: so many of them, spread over all; ``--only``: those whose name contains the words.

Models times clusters, all plans timed by one clock that shares nothing with the planners. Regret: a step's time over
that of the best plan that any system found for the case, less one.
"""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from pathlib import Path

from tests.bench.command import options, write_rows
from tests.bench.planners.cases import cases
from tests.bench.planners.rows import row_of, shown, summary
from tests.bench.planners.systems import SYSTEMS


def main() -> int:
    args = options(__doc__, cases=int, only="", json=Path, processes=2)
    began, every = time.monotonic(), [c for c in cases() if args.only in c.name]
    if args.cases:
        every = [every[k * len(every) // args.cases] for k in range(min(args.cases, len(every)))]
    print(f"{'':46} {'best':>10} " + " ".join(f"{name:>11}" for name in SYSTEMS))
    rows = []
    with get_context("spawn").Pool(args.processes) as pool:
        for row in pool.imap(row_of, every):
            rows.append(row)
            print(shown(row), flush=True)
            write_rows(args.json, rows)
    print(*summary(rows), f"{time.monotonic() - began:.0f} s", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
