"""What runs put into Ray's object store, which is no activation or gradient, and what their processes hold."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import ray
from ray import cloudpickle

from raypipe.job.spec import JobSpec
from raypipe.runtime.process.set_up import heap_bytes
from raypipe.runtime.worker.worker_group import WorkerGroup
from tests.runtime.runs.small_runs import drive, new_driver, small_job

MODEL = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 256, "dropout": 0.0}
MESSAGE_BYTES = 4 * 256 * 256 * 4  # 4 sequences of 256 tokens of 256 float32: 1 MiB


def wide_job(text: Path, steps: int, parallel: dict[str, object]) -> JobSpec:
    return small_job(text, {"microbatch": 4, **parallel}, MODEL, dtype="float32", steps=steps, batch=16)


def created() -> tuple[int, int]:
    """Objects and bytes that were ever put into the object store of this Ray, by anybody.

    Results of a few kilobytes never enter it: they travel inside the reply to their call. The raylet counts what was
    made since it started, so nothing that comes and goes between two looks is missed.
    """
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return stats.cumulative_created_objects, stats.cumulative_created_bytes


@pytest.mark.runs
def test_the_count_sees_an_object(local_ray) -> None:
    objects, size = created()
    kept = ray.put(np.zeros(MESSAGE_BYTES, dtype=np.uint8))
    after = created()
    assert after[0] == objects + 1
    assert after[1] >= size + MESSAGE_BYTES
    del kept


PLANS = [
    {"schedule": "1f1b", "stages": 2},
    {"schedule": "1f1b", "stages": 2, "transport": "gloo"},
    {"schedule": "chimera", "stages": 2},  # also all-reduces its gradients
]


@pytest.mark.runs
@pytest.mark.parametrize("parallel", PLANS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_training_creates_no_objects(parallel, stage_pool, text_folder, tmp_path) -> None:
    stage_pool(2)  # starting actors may create some
    before = created()
    done = drive(wide_job(text_folder, 2, parallel), stage_pool, tmp_path)
    messages = done.driver.counts["p2p"] * len(done.losses)
    assert messages * MESSAGE_BYTES >= 16 << 20  # so much went from device to device
    objects, size = (after - b for after, b in zip(created(), before, strict=True))
    # A checkpoint's and an evaluation's results are small as well: the whole run makes nothing.
    assert (objects, size) == (0, 0)


@pytest.mark.runs
def test_what_ray_carries_is_small(stage_pool, text_folder, tmp_path) -> None:
    """Everything that goes through Ray in a step, and the set-up before the first one."""
    job = wide_job(text_folder, 1, {"schedule": "1f1b", "stages": 2})
    driver = new_driver(job, tmp_path)
    workers = stage_pool(2)
    sent: list[int] = []

    class Counting:
        """A stage actor whose set-up is weighed on its way."""

        def __init__(self, actor: object) -> None:
            self.actor = actor
            self.report = actor.report
            self.setup = self

        def remote(self, setup: object) -> object:
            sent.append(len(cloudpickle.dumps(setup)))
            return self.actor.setup.remote(setup)

    actors = workers.actors
    workers.actors = [Counting(actor) for actor in actors]
    driver._setup(workers, None, 0)
    workers.actors = actors
    assert len(sent) == 2
    assert max(sent) < 32 << 10  # programs of a dozen tasks each, the job, the cut
    results = ray.get(workers.call("run_step", 0))
    carried = [len(cloudpickle.dumps(result)) for result in results]
    tasks = sum(len(order) for order in driver.schedule.orders)
    assert sum(carried) < 16 * tasks + 2 * 1024  # two times per task, and a few figures
    assert ray.get(workers.call("evaluate", 0))[1].loss_sum > 0


# What the driver and the stage actors hold stays flat over hundreds of steps.

STEPS, WARM = 500, 100
"""A run's steps; those before the first look, and between two looks."""
LIMIT = 4 << 20
"""Growth allowed after the warm-up: a sixth of what keeping one message a step (64 KiB) would be; keeping a
micro-batch's activations would be many times that. Counted is what malloc has handed out: resident memory also moves
by what allocators keep for later, 13 MiB once."""
FLAT_MODEL = {"layers": 2, "hidden": 64, "sequence": 64, "dropout": 0.0}


@pytest.mark.runs
def test_five_hundred_steps_keep_no_memory(stage_pool, text_folder, tmp_path) -> None:
    seen: dict[int, tuple[int, list[int], Counter[str]]] = {}

    def look(workers: WorkerGroup, step: int) -> None:
        actors = ray.get(workers.call("heap_bytes"))  # behind the steps that are queued: all of their results are here
        gc.collect()
        objects = Counter(type(each).__qualname__ for each in gc.get_objects())
        seen[step] = (heap_bytes(), actors, objects)

    parallel = {"schedule": "1f1b", "stages": 2, "microbatch": 4}
    job = small_job(text_folder, parallel, FLAT_MODEL, dtype="float32", steps=STEPS, checkpoint_every=WARM, clip=1.0)
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
