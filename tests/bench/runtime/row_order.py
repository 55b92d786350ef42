"""Real steps of packed documents in two stages on two cores: the searched order of rows against that of the data.

    chrt -r 1 python -m tests.bench.runtime.row_order [--rows 8] [--longest 2048] [--steps 8] [--rounds 3]

The lengths are those of files at hand (``tests.bench.uneven``), the tokens random; a Llama of four blocks in float32
and 1F1B, a thread for each stage. Both ways run the same documents in the same steps, in runs that take turns. The
search, of at most 50 ms a step, is the driver's own, on the same two cores. Prints medians over the steps of a median
round, and what the simulator says of the orders that were found, with the predicted times of rows. Exits with 1 where
the searched order is the slower one in the median over documents.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import ray

from raypipe.data import Ragged, flat
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.calls import RowOrders
from raypipe.schedule.costs import CostTable
from raypipe.schedule.microbatch_order import OrderSearch
from tests.bench.command import options
from tests.bench.turns import table
from tests.bench.uneven import documents_at_hand, parts_of
from tests.runtime.runs.small_runs import job_for, new_driver, own_workers

LLAMA = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 704, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WARM = 2
"""Steps at the start of each run that are left out."""


class AsTheyCame(RowOrders):
    """No order but the data's own."""

    def of(self, *_: object) -> dict[int, tuple[int, ...]]:  # type: ignore[override]
        """Return none."""
        return {}


def job_of(folder: Path, lengths: list[int], rows: int, longest: int, steps: int) -> JobSpec:
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 256, n) for n in lengths if n > 1]
    np.savez(folder / "documents.npz", **flat(dict.fromkeys(("input_ids", "labels"), Ragged.of(documents))))
    tokens = longest * (rows + 1) // 2
    model = {"hf": "llama", "config": {**LLAMA, "max_position_embeddings": longest}}
    given = {"steps": steps, "batch": None, "tokens_per_step": tokens, "microbatch_tokens": longest, "dtype": "float32"}
    data = {"type": "arrays", "path": str(folder / "documents.npz")}
    return job_for(model, data, {"schedule": "1f1b", "stages": 2, "microbatch": 1}, **given)


def steps_of(job: JobSpec, run: Path, searched: bool) -> tuple[list[float], float]:
    """Run the job; return the seconds of each step, and the simulated gain of orders that a search finds for them."""
    driver = new_driver(job, run)
    orders = driver._orders
    if not searched:
        driver._orders = AsTheyCame(job, run / "data")
    with own_workers(driver) as workers:
        driver.run(workers, None, 0)
    found, gains = orders.of(driver.running, range(job.train.steps), 0, None), []
    search = OrderSearch(driver.schedule, CostTable.even(driver.schedule.stages), 1)
    for step in range(WARM, job.train.steps):
        times = orders._times(driver.running, step)
        gains.append(search.seconds(times) / search.seconds(times, found.get(step)))
    return [row["step_s"] for row in read_rows(run / METRICS) if "loss" in row][WARM:], median(gains)


def main() -> int:
    """Run every kind of documents both ways."""
    args = options(__doc__, rows=8, longest=2048, steps=8, rounds=3)
    os.environ.setdefault("RAY_ADDRESS", "local")
    lines, ratios = [], []
    for name, whole in documents_at_hand().items():
        own: dict[bool, list[list[float]]] = {True: [], False: []}
        simulated = 1.0
        for number in range(args.rounds):
            for searched in (True, False) if number % 2 == 0 else (False, True):
                with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(sys.stderr):
                    lengths = parts_of(whole, args.longest)
                    job = job_of(Path(place), lengths, args.rows, args.longest, args.steps + WARM)
                    seconds, gain = steps_of(job, Path(place, "run"), searched)
                own[searched].append(seconds)
                simulated = gain if searched else simulated
        came, best = ([median(step) for step in zip(*own[way], strict=True)] for way in (False, True))
        ratio = median(a / b for a, b in zip(came, best, strict=True))
        ratios.append(ratio)
        lines.append((name, f"{median(came):.2f}", f"{median(best):.2f}", f"{ratio:.2f}", f"{simulated:.2f}"))
    ray.shutdown()
    table("", ("documents", "as they came, s", "searched, s", "ratio of a step", "simulated"), lines)
    return int(median(ratios) < 1)


if __name__ == "__main__":
    sys.exit(main())
