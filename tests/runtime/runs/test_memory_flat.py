"""What the driver and the stage actors hold stays flat over hundreds of steps."""

from __future__ import annotations

import gc

import pytest
import ray

from raypipe.runtime.cluster.worker_group import WorkerGroup
from raypipe.runtime.process import heap_bytes
from tests.runtime.runs.small_runs import drive, small_job

STEPS, WARM = 500, 100
LIMIT = 4 << 20
"""Growth allowed after the warm-up: a sixth of what keeping one message a step (64 KiB) would be; keeping a
micro-batch's activations would be many times that. Counted is what malloc has handed out: resident memory also moves
by what allocators keep for later, 13 MiB once."""
MODEL = {"layers": 2, "hidden": 64, "sequence": 64, "dropout": 0.0}


@pytest.mark.runs
def test_five_hundred_steps_keep_no_memory(stage_pool, text_folder, tmp_path) -> None:
    seen: dict[int, tuple[int, list[int], int]] = {}

    def look(workers: WorkerGroup, step: int) -> None:
        gc.collect()
        seen[step] = (heap_bytes(), ray.get(workers.call("heap_bytes")), len(gc.get_objects()))

    parallel = {"schedule": "1f1b", "stages": 2, "microbatch": 4}
    job = small_job(text_folder, parallel, MODEL, dtype="float32", steps=STEPS, checkpoint_every=WARM, clip=1.0)
    done = drive(job, stage_pool, tmp_path, saved=look)
    assert len(done.losses) == STEPS
    driver, actors, objects = seen[WARM]
    driver_end, actors_end, objects_end = seen[STEPS]
    for before, after in zip(actors, actors_end, strict=True):
        assert after - before < LIMIT
    assert objects_end - objects < (STEPS - WARM) // 4  # fewer than one for every fourth step
    assert driver_end - driver < LIMIT
    assert all(resident > 10 << 20 for resident in done.driver.memory_bytes)
