"""A run directory with everything in it that a report shows."""

from __future__ import annotations

import json
from pathlib import Path

from raypipe.observe.run_log import RunLog


def step(number: int, **other: object) -> dict[str, object]:
    return {
        "step": number, "loss": 3.0 / number, "grad_norm": 1.0, "lr": 0.001, "step_s": 0.25, "tokens_per_s": 16384.0,
        "bubble_ratio": 0.125, **other,
    }  # fmt: skip


def candidate(**other: object) -> dict[str, object]:
    return {
        "schedule": "1f1b", "stages": 2, "replicas": 1, "microbatch": 4, "predicted_step_s": 0.2, "bubble_ratio": 0.1,
        "memory_bytes": [3 * 2**30, 2**30], "capacity_bytes": 8 * 2**30, "fits": True, "why": "fastest", **other,
    }  # fmt: skip


def record_run(folder: Path, text: str) -> None:
    """Write it; ``text`` is every text of it."""
    log = RunLog(folder)
    others = [candidate(schedule=text, fits=False, why=text)] * 30
    log.event("planned", candidates=[candidate(), *others], searched=31, timed=0, seconds=1.5)
    log.event("run", resume=False, devices=2, cores=2)
    device = {"name": text, "node": text, "device": text, "pid": 1, "parameters": 10}
    log.event("started", devices=[device], resumed_from=None)
    for number in (1, 2, 3):
        log.metric(step(number, loss=None if number == 2 else 3.0 / number))
    log.metric({"step": 3, "val_loss": 0.75})
    log.event("predicted", step=2, step_s=0.2, bubble_ratio=0.1)
    log.event("replanned", step=2, change=text, gain=0.05)
    log.event("realised", step=3, gain=-0.01)
    log.event("undone", step=3, grad_norm=7.0)
    log.event("failed", message=text)
    log.event("restarted", checkpoint=None)
    log.event("finished", counts={}, memory_bytes=[2 * 2**30, 2**30])
    (folder / "job.json").write_text(json.dumps({"name": text, "train": {"steps": 3, "dtype": text}}))
    parallel = {"schedule": text, "stages": 2, "replicas": 1, "microbatch": 4, "tensor": 1}
    (folder / "plan.json").write_text(json.dumps({"parallel": parallel, "made_for": {"device": text}}))
    spans = [[{"task": "0F0", "start": 0.0, "end": 0.1}], [{"task": "1BW0", "start": 0.1, "end": 0.2}]]
    one = {"makespan": 0.2, "bubble_ratio": 0.5, "spans": spans}
    (folder / "timeline.json").write_text(json.dumps({"predicted": one, "measured": one}))
