"""Give every reader of raypipe thousands of wrong inputs: ``python -m tests.bench.safety.fuzz [--only KIND ...]``.

Each is one that is right with something changed. It has to be taken, and then an independent check must find it right,
or refused by one clear error, within ten seconds. Exits with 1 if any input shows a defect: a traceback, a hang, or a
wrong input that was taken. ``--only``: these kinds, with their part of ``--inputs``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.bench.command import options
from tests.bench.safety.targets import Target, targets
from tests.bench.safety.trial import DEFECTS, attempt

SHOWN = 5
"""Defects of a target that are printed."""


def fuzz(target: Target, inputs: int, seed: int) -> tuple[Counter[str], list[tuple[str, str, str]]]:
    """Try so many inputs; return how often each verdict was given, and (verdict, why, input) of defects."""
    counts: Counter[str] = Counter()
    defects: list[tuple[str, str, str]] = []

    @seeded(seed)
    @settings(
        max_examples=inputs, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(target.strategy)
    def each(value: object) -> None:
        outcome = attempt(target.read, value)
        counts[outcome.verdict] += 1
        if outcome.verdict in DEFECTS:
            defects.append((outcome.verdict, outcome.why, repr(value)))

    each()
    return counts, defects


def main() -> int:
    args = options(__doc__, inputs=20_000, only=(), seed=0)
    total: Counter[str] = Counter()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="raypipe-fuzz-") as name:
        os.environ["RAYPIPE_CACHE_DIR"] = name
        result = targets(Path(name))
        shares = sum(target.share for target in result.values())
        for kind, target in result.items():
            if args.only and kind not in args.only:
                continue
            inputs = -(-args.inputs * target.share // shares)
            since = time.monotonic()
            counts, defects = fuzz(target, inputs, args.seed)
            total += counts
            print(f"{kind:<14} {dict(counts)} {time.monotonic() - since:.0f} s", flush=True)
            shown: Counter[str] = Counter()
            for verdict, why, value in defects:
                shown[why[-200:]] += 1
                if shown[why[-200:]] == 1 and len(shown) <= SHOWN:
                    print(f"  {verdict}: {value[:600]}\n    " + why.strip().replace("\n", "\n    "))
    print(json.dumps({"inputs": sum(total.values()), **total, "seconds": round(time.monotonic() - begun)}))
    return 1 if any(total[verdict] for verdict in DEFECTS) else 0


if __name__ == "__main__":
    sys.exit(main())
