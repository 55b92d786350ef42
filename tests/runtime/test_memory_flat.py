"""Memory of the driver and of the stage actors stays flat over hundreds of steps."""

from __future__ import annotations

import gc
import os

import pytest
import ray

from raypipe.runtime.launch import Fleet
from tests.runtime.small_runs import drive, small_job

STEPS, WARM = 500, 100
LEAK_LIMIT = 3 << 20
"""Allowed growth after the warm-up. Keeping one message a step (16 KiB) would be 6 MiB, keeping the activations of one
micro-batch much more; the allocators alone move by 0.2 MiB in an actor and by 2 in this large process."""
MODEL = {"layers": 2, "hidden": 32, "sequence": 32, "dropout": 0.0}


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.runs
def test_five_hundred_steps_keep_no_memory(stage_pool, text_folder, tmp_path) -> None:
    seen: dict[int, tuple[int, list[int], int]] = {}

    def look(fleet: Fleet, step: int) -> None:
        gc.collect()
        seen[step] = (resident_bytes(), ray.get(fleet.call("memory_bytes")), len(gc.get_objects()))

    parallel = {"schedule": "1f1b", "stages": 2, "microbatch": 4}
    job = small_job(text_folder, parallel, MODEL, dtype="float32", steps=STEPS, checkpoint_every=WARM, clip=1.0)
    done = drive(job, stage_pool, tmp_path, saved=look)
    assert len(done.losses) == STEPS
    driver, actors, objects = seen[WARM]
    driver_end, actors_end, objects_end = seen[STEPS]
    assert driver_end - driver < LEAK_LIMIT
    for before, after in zip(actors, actors_end, strict=True):
        assert after - before < LEAK_LIMIT
    # Resident memory cannot see a small result kept for every step; a count of Python's objects can.
    assert objects_end - objects < STEPS - WARM
    assert done.driver.memory_bytes == pytest.approx(actors_end, abs=LEAK_LIMIT)
