"""What reverse first-k gains over other ways to sum gradients, layer by layer, in pure data parallelism.

    python -m tests.bench.runtime.first_k [--emulate [--seconds 4] [--steps 4]]

Cases are layer profiles: ResNet-50 on sixteen workers (compute by the operations of its 54 layers with weights, sums by
their parameters in a ring over links of 25 or 10 Gb/s), and the paper's: 380 ms of compute and 350 ms to sum the first
layer (Oh et al. 2022, section 7.3). Each is timed by the layer clock (``simulate.layer_sync``), whose link can turn to
a more urgent sum at any time.

``--emulate`` runs three of the cases on sixteen emulated devices, through the real driver, programs and collectives,
with two or three layers in one, and sums in pieces of the size that the runtime has; every time is longer by one
factor. Limits: each step is within 3 % of its prediction, and reverse first-k is faster than what it is predicted to
beat by 6 % or more. Nothing is trained.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import NamedTuple

from raypipe.runtime.emulation.emulated_run import LayerLink, Rehearsal, run_rehearsal
from raypipe.runtime.update.prioritised_all_reduce import PIECE_BYTES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.out_of_order import reverse_first_k
from raypipe.search.first_k import tune_first_k
from raypipe.simulate.layer_sync import LayerSync, layer_step_time
from tests.bench.accuracy.emulated import first, longer, worker_group_of
from tests.bench.command import options

WORKERS = 16
USUAL: tuple[LayerSync, ...] = ("lazy", "wait-free", "prioritised")


OFF = 0.03
"""Most that an emulated step may differ from its prediction."""


class Case(NamedTuple):
    name: str
    costs: CostTable
    piece_s: float
    """What the link takes for a piece, where sums are sent in pieces."""


def table_of(forward: Sequence[float], back: Sequence[float], sums: Sequence[float]) -> CostTable:
    """Costs per layer, in seconds; the input gradient and the weight gradient take as long each."""
    zeros = (0.0,) * len(sums)
    return CostTable(
        forward=tuple(forward), input_grad=tuple(back), weight_grad=tuple(back), recompute=zeros, update=zeros,
        all_reduce=tuple(sums),
    )  # fmt: skip


def resnet_50() -> list[tuple[float, float]]:
    """(multiplications for an image of 224 x 224, parameters) of each convolution and of the classifier."""
    found = [(7 * 7 * 3 * 64 * 112.0**2, 7 * 7 * 3 * 64.0)]
    before = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            inner = [before * width, 9 * width * width, width * 4 * width]
            inner += [before * 4 * width] if block == 0 else []
            found += [(float(size * side * side), float(size)) for size in inner]
            before = 4 * width
    return [*found, (2048 * 1000.0, 2048 * 1000.0)]


def resnet_case(compute_s: float, gigabits: float) -> Case:
    """``compute_s``: of a forward and a backward."""
    layers = resnet_50()
    each = compute_s / 3 / sum(work for work, _ in layers)
    ring = 2 * (WORKERS - 1) / WORKERS * 4 / (gigabits * 1e9 / 8)
    name = f"ResNet-50, {compute_s * 1e3:.0f} ms, {gigabits:g} Gb/s"
    forward = [work * each for work, _ in layers]
    return Case(name, table_of(forward, forward, [size * ring for _, size in layers]), ring * PIECE_BYTES / 4)


def papers_case() -> Case:
    each = [0.380 / 3 / 54] * 54
    return Case("380 ms, first sum 350 ms", table_of(each, each, [0.350, *[0.5e-3] * 53]), 0.025)


CASES = [resnet_case(s, g) for g in (25, 10) for s in (0.380, 0.173, 0.087)] + [papers_case()]


def simulated(case: Case) -> dict[str, float]:
    """Way -> seconds of a step; the last has the best k in its name."""
    count = case.costs.stages

    def step(k: int) -> float:
        return layer_step_time(reverse_first_k(count, k), case.costs, "prioritised")

    usual = reverse_first_k(count, 0)
    found: dict[str, float] = {way: layer_step_time(usual, case.costs, way) for way in USUAL}
    best = tune_first_k(step, count)
    return {**found, f"k = {best.k}": best.seconds}


def in_blocks(case: Case, size: int = 3) -> Case:
    """The case with so many layers in one."""
    groups = [range(a, min(a + size, case.costs.stages)) for a in range(0, case.costs.stages, size)]
    rows = {
        f.name: tuple(sum(times[n] for n in group) for group in groups)
        for f in fields(case.costs) if f.name != "comm" and (times := getattr(case.costs, f.name))
    }  # fmt: skip
    return case._replace(costs=replace(case.costs, **rows))


EMULATED = [in_blocks(CASES[5]), in_blocks(CASES[2]), in_blocks(CASES[6], 2)]
"""So many layers that two cores keep up."""


def emulated(cases: Sequence[Case], seconds: float, steps: int) -> bool:
    """Run each way of each case on sixteen devices; whether all are within the limits.

    ``seconds``: of a step's compute.
    """
    good = True
    with contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(sys.stderr):
            workers = stack.enter_context(worker_group_of(WORKERS))
        for blocks in cases:
            count = blocks.costs.stages
            scale = seconds / sum(map(sum, (blocks.costs.forward, blocks.costs.input_grad, blocks.costs.weight_grad)))
            case = blocks._replace(costs=longer(blocks.costs, scale), piece_s=scale * blocks.piece_s)

            def step(k: int, case: Case = case) -> float:
                return layer_step_time(reverse_first_k(case.costs.stages, k), case.costs, "prioritised", case.piece_s)

            k = tune_first_k(step, count).k
            ways = [(way, 0, way) for way in USUAL] + [(f"k = {k}", k, USUAL[-1])]
            found: list[tuple[float, float]] = []
            for name, postponed, sync in ways:
                link = LayerLink(sync, case.piece_s)
                schedule = link.copies_of(reverse_first_k(count, postponed), WORKERS)
                what = Rehearsal(schedule=schedule, costs=case.costs, copies=WORKERS, layers=link)
                seen = run_rehearsal(what, first(workers, WORKERS), steps)
                predicted, measured = (fmean(x[1:]) / scale for x in (seen.predicted_steps_s, seen.measured_s))
                found.append((predicted, measured))
                good = good and abs(measured / predicted - 1) <= OFF
                times = f"predicted {predicted * 1e3:7.1f} ms, measured {measured * 1e3:7.1f} ms"
                print(f"{case.name:28} {name:12} {times} ({measured / predicted - 1:+.1%})", flush=True)
            best = found[-1]
            for (name, _, _), one in zip(ways[:-1], found[:-1], strict=True):
                gains = f"predicted {one[0] / best[0]:.3f}, measured {one[1] / best[1]:.3f}"
                print(f"{case.name:28} reverse first-k is faster than {name:12} by {gains}", flush=True)
                good = good and (one[0] < best[0] * (1 + 2 * OFF) or one[1] > best[1])
    return good


def show(case: str, found: dict[str, float]) -> None:
    """Print a line: a step's time each way, and how often faster the last one is than each other."""
    *_, (k, best) = found.items()
    times = " ".join(f"{seconds * 1e3:10.1f}" for seconds in found.values())
    gains = " ".join(f"{seconds / best:10.3f}" for seconds in list(found.values())[:-1])
    print(f"{case:28} {times} {k:>7} {gains}", flush=True)


def head() -> None:
    ways = " ".join(f"{way:>10}" for way in (*USUAL, "first-k"))
    print(f"{'milliseconds of a step':28} {ways} {'':7} {'and first-k is faster by':>32}")


def main() -> int:
    """Print both tables, or the emulated steps; exit status 1 if a limit is exceeded."""
    args = options(__doc__, emulate=False, seconds=4.0, steps=4, first=0)
    if args.emulate:
        return 0 if emulated(EMULATED[args.first :], args.seconds, args.steps) else 1
    head()
    for case in CASES:
        show(case.name, simulated(case))
    return 0


if __name__ == "__main__":
    sys.exit(main())
