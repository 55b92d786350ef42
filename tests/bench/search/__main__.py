"""How good the orders of ``auto`` are, and how long they take to find: ``python -m tests.bench.search [NAME ...]``.

Every case prints a line per instance and holds it against the case's own limit. Exit status 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.bench.search import (
    against_bounds,
    against_others,
    emulated,
    exhaustive,
    gathers,
    joint,
    joint_emulated,
    lora,
    speed,
)
from tests.bench.search.line import Effort, Line


class Case(NamedTuple):
    run: Callable[[Effort], Iterator[Line]]
    about: str
    limit: str
    effort: Effort


CASES = {
    "exact": Case(
        against_bounds.exact, "random small instances of every placement, against optima by constraint programming",
        "1 % above the optimum on average; no bound above a possible makespan",
        Effort(200, 2.5, 1000),
    ),
    "tight": Case(
        against_bounds.tight, "D = 8, N = 16 in very little memory, against a proof (up to SECONDS each)",
        "1 % above the proven makespan; proofs give 700 and 912",
        Effort(4, 300.0),
    ),
    "scarce": Case(
        against_bounds.scarce, "bounds in little memory, by longest paths and by one device at a time, against optima",
        "no bound above an optimum",
        Effort(150, 0.2),
    ),
    "candidates": Case(
        exhaustive.candidates, "what is chosen, against all candidates ordered and timed, on random small cases",
        "1 % longer than the fastest; the median is the fastest",
        Effort(60, 0.0),
    ),
    "peers": Case(
        against_others.peers, "device spans, against figures from the zero-bubble authors' own scheduler",
        "none of theirs is shorter",
        Effort(len(against_others.PEER), 0.0),
    ),
    "uneven": Case(
        against_others.uneven, "stages uneven by up to 25 %, against the bound and the zero-bubble heuristic",
        "no order of the heuristic is shorter",
        Effort(30, 2.0),
    ),
    "speed": Case(
        speed.speed, "seconds of one pass and one move as steps grow, and where whole searches end",
        "linear: a task of any step takes at most 8 times as long as one of another",
        Effort(len(speed.SIZES), 0.0),
    ),
    "gathers": Case(
        gathers.gathers, "searched gather positions on random shapes, against both ends and torch's lowering",
        "none slower than either end; 1.25 times torch's speed on half of those with a slow link",
        Effort(100, 0.0),
    ),
    "joint": Case(
        joint.joint, "cut, placement and order together on AdaPtis' kinds of models, in interleaved 1F1B's memory",
        "a geometric mean of 1.42 times interleaved 1F1B's speed on the even cut; none takes more memory",
        Effort(0, 12.0),
    ),
    "joint-emulated": Case(
        joint_emulated.emulated, "the same plans, or those kept in --plans, on emulated devices; wants a quiet machine",
        "3 % between a step and its prediction; none takes more memory",
        Effort(0, 12.0),
    ),
    "ceilings": Case(
        joint.ceilings, "what no plan can exceed on AdaPtis' kinds of models, by certificates alone", "none",
        Effort(0, 1.0),
    ),
    "certificates": Case(
        joint.certificates, "the gap to the certificate on random uneven models, 2 to 16 devices, in the same memory",
        "2 % on nine of ten, 5 % on all of up to 8 devices; none takes more memory",
        Effort(100, 20.0),
    ),
    "lora": Case(
        lora.lora, "adapters on a medium GPT-2: plans that know of frozen weights beside those that do not",
        "1.3 times as fast on a line of stages whose first blocks are frozen",
        Effort(len(lora.DEVICES), 0.0),
    ),
    "lora-emulated": Case(
        lora.emulated, "the same on four emulated devices; wants a quiet machine",
        "3 % between a step and its prediction",
        Effort(1, 0.0),
    ),
    "emulated": Case(
        emulated.emulated, "auto beside 1F1B, interleaved 1F1B and ZB-H1 on emulated devices; wants a quiet machine",
        "3 % between a step and its prediction, one percentage point between leads",
        Effort(3, 0.0),
    ),
}  # fmt: skip
"""In order of how much they need of the machine: the last one starts Ray and takes four minutes."""


def arguments() -> argparse.Namespace:
    cases = "\n".join(f"  {name:16}{case.about}\n{'':18}limit: {case.limit}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.search", description=__doc__, epilog=f"cases:\n{cases}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to run; all if none is named")
    parser.add_argument("--count", type=int, help="instances of each case; default: the case's own number")
    parser.add_argument("--seconds", type=float, help="of a search, or of a proof; default: the case's own")
    parser.add_argument("--first", type=int, help="seed of the first instance")
    parser.add_argument("--emulate", type=int, help="gathers: so many of the instances run on emulated devices too")
    parser.add_argument(
        "--plans", type=Path, metavar="DIR", help="joint, joint-emulated: keep the plans in this folder"
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return args


def main() -> int:
    args = arguments()
    keys = ("count", "seconds", "first", "emulate", "plans")
    wanted = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    failed = []
    for name in args.names or CASES:
        case = CASES[name]
        print(f"{name}: {case.about}", flush=True)
        for line in case.run(replace(case.effort, **wanted)):
            print(f"  {line.text}{'  <- over the limit' if line.fails else ''}", flush=True)
            failed += [name] if line.fails else []
    for name in dict.fromkeys(failed):
        print(f"{name}: {failed.count(name)} lines are over the limit ({CASES[name].limit})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
