"""Steps of packed documents on 8 simulated stages: searched order against arrival, rows by predicted time against by
tokens.

The lengths are those of files at hand, four bytes a token: the modules of Python's standard library, the documentation
of installed packages, and licences. A step has 32 rows. The smallest budget is the least into which the longest
document fits; there one document may be a row by itself, and takes several times as long as others. Gains are medians
over steps, and at the end over documents and schedules. Exits with 1 where the searched order is slower than arrival.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from raypipe.data.packed import balanced, dealt, step_documents, time_of
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.microbatch_order import OrderSearch
from raypipe.schedule.shape import Shape
from tests.bench.command import options

STAGES, ROWS = 8, 32
BYTES_A_TOKEN = 4
EVEN = 6 * 1024
"""Length at which attention takes as long as all else in a block of width h = 1,024: 24 h^2 operations a token, and 4 h
for each token that it sees."""
BUDGETS = (1, 2, 4)
"""Budgets of a step, in the least."""
COLUMNS = {
    "order (tokens)": "searched order against arrival, rows by tokens",
    "order (time)": "searched order against arrival, rows by predicted time",
    "time": "rows by predicted time against by tokens, in arrival order",
    "time (searched)": "the same, both in searched order",
    "both": "rows by predicted time in searched order against rows by tokens in arrival order",
    "longest": "the longest row by predicted time, in mean rows",
}


def documents_at_hand() -> dict[str, list[int]]:
    """Return the lengths in tokens of three kinds of documents."""
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    files: dict[str, Iterable[Path]] = {
        "standard library": (p for p in library.rglob("*.py") if "site-packages" not in p.parts),
        "documentation": (p for p in packages.rglob("*") if p.suffix in (".md", ".rst", ".txt", ".html")),
        "licences": (*Path("/usr/share/doc").glob("*/copyright"), *packages.rglob("*LICEN*")),
    }
    return {
        name: [size // BYTES_A_TOKEN for p in sorted(own) if p.is_file() and (size := p.stat().st_size) > BYTES_A_TOKEN]
        for name, own in files.items()
    }


def parts_of(lengths: Sequence[int], longest: int) -> list[int]:
    """Return the lengths of documents that are split."""
    return [min(longest, length - at) for length in lengths for at in range(0, length, longest)]


def gains(lengths: Sequence[int], tokens: int, search: OrderSearch, steps: int, budget_s: float) -> np.ndarray:
    """Return the figures of each step, ``[steps, len(COLUMNS)]``."""
    taken = step_documents(np.array(lengths), "train", 0, tokens)
    most = -(-2 * tokens // (ROWS + 1))
    result = []
    for step in range(steps):
        own = [lengths[i] for i in taken.at(step)]

        def rows_by(even: int, own: Sequence[int] = own) -> list[int]:
            rows = dealt(balanced(own, ROWS, most, even), [0] * ROWS, 1)
            return [max(1, sum(time_of(own[i], EVEN) for i in row)) for row in rows]

        by_time, by_tokens = rows_by(EVEN), rows_by(1 << 40)
        whole = sum(by_time)  # the simulator's unit: a row of mean time takes the same for both

        def seconds(times: Sequence[int], searched: bool, step: int = step, whole: int = whole) -> float:
            order = search.best(times, step, budget_s) if searched else None
            return search.seconds(times, order) * sum(times) / whole

        a, b = seconds(by_time, False), seconds(by_tokens, False)
        a2, b2 = seconds(by_time, True), seconds(by_tokens, True)
        result.append((b / b2, a / a2, b / a, b2 / a2, b / a2, max(by_time) * ROWS / whole))
    return np.array(result)


def main() -> int:
    args = options(__doc__, steps=20, longest=32768, seconds=0.05)
    print("".join(f"{name}: {meaning}\n" for name, meaning in COLUMNS.items()))
    print(" " * 28 + "".join(f"{name:>17}" for name in COLUMNS))
    found: dict[int, list[np.ndarray]] = {times: [] for times in BUDGETS}
    for name, whole in documents_at_hand().items():
        lengths = parts_of(whole, args.longest)
        print(f"{name}: {len(whole)} documents, median {median(whole):.0f} tokens, 99 % below "
              f"{np.percentile(whole, 99):.0f}, longest {max(whole)}, split at {args.longest}")  # fmt: skip
        for family, times in product(("1f1b", "zb-h1", "chimera"), BUDGETS):
            schedule = generate(family, Shape(devices=STAGES, microbatches=ROWS))
            search = OrderSearch(schedule, CostTable.even(schedule.stages), 1)
            tokens = times * -(-max(lengths) * (ROWS + 1) // 2)
            found[times].append(np.median(gains(lengths, tokens, search, args.steps, args.seconds), axis=0))
            print(f"  {family:8} {tokens:9,} tokens" + "".join(f"{x:17.2f}" for x in found[times][-1]))
    for times, rows in found.items():
        print(f"median, {times} times the least" + "".join(f"{x:17.2f}" for x in np.median(rows, axis=0)))
    return int(min(row[:2].min() for rows in found.values() for row in rows) < 1)


if __name__ == "__main__":
    sys.exit(main())
