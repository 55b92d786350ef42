"""Memory of the driver and of the stage actors stays flat over hundreds of steps."""

from __future__ import annotations

import gc
import os

import pytest
import ray

from raypipe.runtime.launch import Fleet
from tests.runtime.small_runs import drive, small_job

STEPS, WARM = 500, 100
LIMIT = 12 << 20
"""Growth allowed after the warm-up: half of what keeping one message a step (64 KiB) would be; keeping a micro-batch's
activations would be many times that. Allocators (torch's, Ray's, glibc's) settle over the first hundreds of steps and
go up and down by some MiB; over 3000 steps an actor grew by 0.1 MiB per 300. What the driver could keep of a step is
small, so there Python's objects are counted as well."""
MODEL = {"layers": 2, "hidden": 64, "sequence": 64, "dropout": 0.0}


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
    for before, after in zip(actors, actors_end, strict=True):
        assert after - before < LIMIT
    assert objects_end - objects < (STEPS - WARM) // 4  # fewer than one for every fourth step
    assert driver_end - driver < LIMIT
    assert done.driver.memory_bytes == pytest.approx(actors_end, abs=LIMIT)
