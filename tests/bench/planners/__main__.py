"""What raypipe chooses, beside what others would take: ``python -m tests.bench.planners [--cases N] [--json FILE]``.

Models times clusters, all plans timed by one clock that shares nothing with the planners. Regret: a step's time over
that of the best plan that any system found for the case, less one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from multiprocessing import get_context
from pathlib import Path

from tests.bench.planners.cases import cases
from tests.bench.planners.rows import row_of, shown, summary
from tests.bench.planners.systems import SYSTEMS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.planners", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, metavar="N", help="only N of them, spread over all; default: all")
    parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose name contains WORDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every plan and time")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    began, every = time.monotonic(), [c for c in cases() if args.only in c.name]
    if args.cases:
        every = [every[k * len(every) // args.cases] for k in range(min(args.cases, len(every)))]
    print(f"{'':46} {'best':>10} " + " ".join(f"{name:>11}" for name in SYSTEMS))
    rows = []
    with get_context("spawn").Pool(args.processes) as pool:
        for row in pool.imap(row_of, every):
            rows.append(row)
            print(shown(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    print(*summary(rows), f"{time.monotonic() - began:.0f} s", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
