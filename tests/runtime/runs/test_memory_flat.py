"""What the driver and the stage actors hold stays flat over hundreds of steps."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise

import pytest
import ray

from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.runtime.process.set_up import heap_bytes
from tests.runtime.runs.small_runs import drive, small_job

STEPS, WARM = 500, 100
"""A run's steps; those before the first look, and between two looks."""
LIMIT = 4 << 20
"""Growth allowed after the warm-up: a sixth of what keeping one message a step (64 KiB) would be; keeping a
micro-batch's activations would be many times that. Counted is what malloc has handed out: resident memory also moves
by what allocators keep for later, 13 MiB once."""
MODEL = {"layers": 2, "hidden": 64, "sequence": 64, "dropout": 0.0}


@pytest.mark.runs
def test_five_hundred_steps_keep_no_memory(stage_pool, text_folder, tmp_path) -> None:
    seen: dict[int, tuple[int, list[int], Counter[str]]] = {}

    def look(workers: WorkerGroup, step: int) -> None:
        actors = ray.get(workers.call("heap_bytes"))  # behind the steps that are queued: all of their results are here
        gc.collect()
        objects = Counter(type(each).__qualname__ for each in gc.get_objects())
        seen[step] = (heap_bytes(), actors, objects)

    parallel = {"schedule": "1f1b", "stages": 2, "microbatch": 4}
    job = small_job(text_folder, parallel, MODEL, dtype="float32", steps=STEPS, checkpoint_every=WARM, clip=1.0)
    done = drive(job, stage_pool, tmp_path, saved=look)
    assert len(done.losses) == STEPS
    driver, actors, _ = seen[WARM]
    driver_end, actors_end, _ = seen[STEPS]
    for before, after in zip(actors, actors_end, strict=True):
        assert after - before < LIMIT
    # Fewer than one object for every second step. What a step keeps is kept between any two checkpoints, so objects of
    # its types grow from each look to the next. What happens once (a line that Ray forwards from another actor) shows
    # between two of them alone, and what is under way while it is counted (several steps a call) goes up and down.
    looks = [objects for *_, objects in seen.values()]
    grown = [Counter({of: after[of] - before[of] for of in after}) for before, after in pairwise(looks)]
    kept = Counter({of: min(one[of] for one in grown) for of in looks[-1]})
    assert (+kept).total() < WARM // 2, kept.most_common(10)
    assert driver_end - driver < LIMIT
    assert all(resident > 10 << 20 for resident in done.driver.memory_bytes)
