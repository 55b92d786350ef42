"""Forward doubling's pair as one forward, against two: what a stage's forward takes, without activations kept.

    python -m tests.bench.paired_forward [--repeats 40]

One thread, processor time, medians; the two ways alternate. What is joined and split again is counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from raypipe.job import GptSpec
from raypipe.models import GptLayers, random_keys
from raypipe.runtime.backward.stack import stacked, unstacked
from raypipe.runtime.process import set_up_process
from raypipe.runtime.stage.stage import StageModule

CPU = torch.device("cpu")
STAGES = [  # hidden, sequence, blocks, samples of a micro-batch, dropout
    (32, 16, 1, 1, 0.1), (64, 32, 1, 1, 0.0), (64, 32, 1, 4, 0.1), (128, 128, 2, 1, 0.1), (128, 128, 2, 4, 0.1),
    (256, 128, 4, 1, 0.1), (256, 128, 4, 4, 0.1), (512, 128, 2, 1, 0.0), (512, 256, 2, 4, 0.0),
]  # fmt: skip


def measure(hidden: int, sequence: int, blocks: int, samples: int, dropout: float, repeats: int) -> tuple[float, float]:
    """Seconds of two forwards, and of one for both."""
    spec = GptSpec(layers=blocks + 2, hidden=hidden, heads=4, sequence=sequence, vocabulary=256, dropout=dropout)
    stage = StageModule(GptLayers(spec), range(1, 1 + blocks), 0, CPU, split=False)
    arrived = [(torch.randn(samples, sequence, hidden),) for _ in range(2)]

    def two() -> None:
        for k, one in enumerate(arrived):
            with random_keys(0, 0, range(k * samples, (k + 1) * samples), training=True):
                stage(one, {})

    def together() -> None:
        with random_keys(0, 0, range(2 * samples), training=True):
            unstacked(stage(stacked(arrived), {}), 2)

    times: dict[Callable[[], None], list[float]] = {two: [], together: []}
    with torch.no_grad():
        for _ in range(repeats):
            for way, seen in times.items():
                begun = time.thread_time()
                way()
                seen.append(time.thread_time() - begun)
    return median(times[two][3:]), median(times[together][3:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    set_up_process(CPU)
    shown = Table("hidden", "sequence", "blocks", "samples", "dropout", "two ms", "one ms", "ratio")
    for row in STAGES:
        two, one = measure(*row, repeats)
        shown.add_row(*map(str, row), f"{two * 1e3:.2f}", f"{one * 1e3:.2f}", f"{one / two:.2f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
