"""What reverse first-k gains over other ways to sum gradients, layer by layer, in pure data parallelism.

    python -m tests.bench.runtime.first_k

Cases are layer profiles: ResNet-50 on sixteen workers (compute by the operations of its 54 layers with weights, sums by
their parameters in a ring over links of 25 or 10 Gb/s), and the paper's: 380 ms of compute and 350 ms to sum the first
layer (Oh et al. 2022, section 7.3). Each is timed by the layer clock (``tune_first_k.layer_step_time``), whose link can
turn to a more urgent sum at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypipe.plan.online.tune_first_k import LayerSync, layer_step_time, tune_first_k
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.out_of_order import reverse_first_k

WORKERS = 16
USUAL: tuple[LayerSync, ...] = ("lazy", "wait-free", "prioritised")


class Case(NamedTuple):
    name: str
    costs: CostTable


def table_of(forward: Sequence[float], back: Sequence[float], sums: Sequence[float]) -> CostTable:
    """Costs per layer, in seconds; the input gradient and the weight gradient take as long each."""
    return CostTable(forward=tuple(forward), input_grad=tuple(back), weight_grad=tuple(back), all_reduce=tuple(sums))


def resnet_50() -> list[tuple[float, float]]:
    """(multiplications for an image of 224 x 224, parameters) of each convolution and of the classifier."""
    result = [(7 * 7 * 3 * 64 * 112.0**2, 7 * 7 * 3 * 64.0)]
    before = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            inner = [before * width, 9 * width * width, width * 4 * width]
            inner += [before * 4 * width] if block == 0 else []
            result += [(float(size * side * side), float(size)) for size in inner]
            before = 4 * width
    return [*result, (2048 * 1000.0, 2048 * 1000.0)]


def resnet_case(compute_s: float, gigabits: float) -> Case:
    """``compute_s``: of a forward and a backward."""
    layers = resnet_50()
    each = compute_s / 3 / sum(work for work, _ in layers)
    ring = 2 * (WORKERS - 1) / WORKERS * 4 / (gigabits * 1e9 / 8)
    name = f"ResNet-50, {compute_s * 1e3:.0f} ms, {gigabits:g} Gb/s"
    forward = [work * each for work, _ in layers]
    return Case(name, table_of(forward, forward, [size * ring for _, size in layers]))


def papers_case() -> Case:
    each = [0.380 / 3 / 54] * 54
    return Case("380 ms, first sum 350 ms", table_of(each, each, [0.350, *[0.5e-3] * 53]))


CASES = [resnet_case(s, g) for g in (25, 10) for s in (0.380, 0.173, 0.087)] + [papers_case()]


def simulated(case: Case) -> dict[str, float]:
    """Way -> seconds of a step; the last has the best k in its name."""
    count = case.costs.stages

    def step(k: int) -> float:
        return layer_step_time(reverse_first_k(count, k), case.costs, "prioritised")

    usual = reverse_first_k(count, 0)
    result: dict[str, float] = {way: layer_step_time(usual, case.costs, way) for way in USUAL}
    best = tune_first_k(step, count)
    return {**result, f"k = {best.k}": best.seconds}


def show(case: str, found: dict[str, float]) -> None:
    """Print a line: a step's time each way, and how often faster the last one is than each other."""
    *_, (k, best) = found.items()
    times = " ".join(f"{seconds * 1e3:10.1f}" for seconds in found.values())
    gains = " ".join(f"{seconds / best:10.3f}" for seconds in list(found.values())[:-1])
    print(f"{case:28} {times} {k:>7} {gains}", flush=True)


def head() -> None:
    ways = " ".join(f"{way:>10}" for way in (*USUAL, "first-k"))
    print(f"{'milliseconds of a step':28} {ways} {'':7} {'and first-k is faster by':>32}")


def main() -> None:
    """Print the table."""
    head()
    for case in CASES:
        show(case.name, simulated(case))


if __name__ == "__main__":
    main()
