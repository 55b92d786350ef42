"""Every family of the zoo against the eager model: one and two stages, joint and split backward, float64.

    python -m tests.bench.zoo [NAME ...]

Prints a row per family: the largest difference of the loss and of any gradient, the share of the weight gradients'
FLOPs that stays in B, the seconds of the capture; or the reason why it is refused.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

import torch

from tests.bench.command import options
from tests.zoo.compare import compare
from tests.zoo.families import FAMILIES
from tests.zoo.more_families import MORE


def main() -> int:
    """Compare; the exit status is the number of families that are not as their row says."""
    asked = options(__doc__, [*FAMILIES, *MORE])
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="raypipe-zoo-") as folder:
        os.environ.setdefault("RAYPIPE_CACHE_DIR", folder)
        for name, family in {**FAMILIES, **MORE}.items():
            if asked.names and name not in asked.names:
                continue
            try:
                row = compare(family)
            except Exception as error:  # a crash is what this command looks for
                bad += 1
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{last.filename}:{last.lineno}"
                print(f"{name:30} CRASH {type(error).__name__}: {str(error)[:300]} ({place})", flush=True)
                continue
            if row.refused:
                good = bool(family.refused) and family.refused in row.refused
                print(f"{name:30} {'refused' if good else 'REFUSED'}: {row.refused[:400]}", flush=True)
            else:
                good = (
                    not family.refused and max(row.loss, row.gradient) <= family.tolerance and row.left <= family.left
                )
                print(
                    f"{name:30} {'exact' if good else 'OFF'} loss {row.loss:.1e} gradients {row.gradient:.1e} "
                    f"in B {row.left:.1%} capture {row.capture_s:.1f} s", flush=True,
                )  # fmt: skip
            bad += not good
    return bad


if __name__ == "__main__":
    sys.exit(main())
