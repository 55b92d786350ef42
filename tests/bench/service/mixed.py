"""Time calls of several models in one pass through the pipeline beside the same calls one after the other, in turns.

    python -m tests.bench.service.mixed [--models 4] [--rounds 20] [--hidden 256] [--json FILE]

A GPT of four layers in two stages, float32; each model's call has one micro-batch, which alone keeps one stage busy at
a time. A round is a call of each model and an update of each, waited for at its end; medians of the rounds. Losses of
both ways have to be the same to 1e-5.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from raypipe.job.spec import job_from
from raypipe.runtime.session.call_data import Datum
from raypipe.runtime.session.session import Call, Session, arrays
from raypipe.runtime.session.session_worker import AdamW
from raypipe.service.actor import opened
from tests.bench.command import options, write_rows

CLOSE = 1e-5


def data_of(rng: random.Random) -> list[Datum]:
    """Return two sequences."""
    tokens = [[rng.randrange(256) for _ in range(129)] for _ in range(2)]
    return [arrays(one[:-1], target_tokens=one[1:], weights=np.ones(128)) for one in tokens]


def round_of(session: Session, data: list[list[Datum]], slots: range, mixed: bool) -> tuple[float, list[float]]:
    """Return the seconds of a round, and the losses."""
    began = time.monotonic()
    calls = [Call(one, slot=slot) for slot, one in zip(slots, data, strict=True)]
    queued = session.together("backward", calls) if mixed else [session.together("backward", [c])[0] for c in calls]
    updates = [session.optim_step(AdamW(lr=1e-3), slot) for slot in slots]
    for update in updates:
        update.result()
    losses = [call.result().loss_sum for call in queued]
    return time.monotonic() - began, losses


def main() -> int:
    """Run all rounds; the exit status says if losses differ."""
    asked = options(__doc__, models=4, rounds=20, hidden=256, json=Path)
    model = {
        "type": "gpt", "layers": 4, "hidden": asked.hidden, "heads": 4, "sequence": 128, "vocabulary": 256,
        "dropout": 0.0,
    }  # fmt: skip
    job = job_from(
        {
            "name": "mixed", "model": model, "data": {"type": "bytes", "path": "stdlib"},
            "train": {"steps": 1, "batch": 8}, "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
        }
    )  # fmt: skip
    rng = random.Random(1)
    times: tuple[list[float], list[float]] = ([], [])
    apart = 0.0
    with tempfile.TemporaryDirectory(prefix="raypipe-bench-mixed-") as name:
        folder = Path(name)
        with opened(job, folder / "run", print) as (_, session):
            session.save(folder / "start").result()
            for slot in range(2 * asked.models):  # one model of each pair trains one way
                session.load(folder / "start", with_optimizer=False, slot=slot, lasting=True)
            for number in range(asked.rounds + 3):
                data = [data_of(rng) for _ in range(asked.models)]
                found = []
                for mixed in (False, True):
                    slots = range(asked.models * mixed, asked.models * (mixed + 1))
                    seconds, losses = round_of(session, data, slots, mixed)
                    found.append(losses)
                    if number >= 3:
                        times[mixed].append(seconds)
                apart = max(apart, *(abs(a - b) / abs(a) for a, b in zip(*found, strict=True)))
    one, together = map(median, times)
    print(
        f"{asked.models} models: a round {one * 1e3:.1f} ms one after the other, {together * 1e3:.1f} ms in one pass "
        f"({one / together:.2f} times as fast); losses {apart:.1e} apart"
    )
    write_rows(asked.json, {"one": times[0], "together": times[1], "apart": apart})
    return int(apart > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
