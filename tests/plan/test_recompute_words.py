"""What the planner's table prints of recomputation can be typed into a job, and means the same there."""

import json
import re
from typing import get_args

import pytest

from raypipe.job import load_job
from raypipe.job.parallel_spec import PLANNED
from raypipe.job.spec import JobSpec
from raypipe.observe.plan_table import details
from raypipe.plan.candidate import Recompute
from raypipe.plan.choose import choose, plan_of
from raypipe.plan.plan import Plan, build_schedule
from raypipe.plan.predict.prediction import Prediction
from tests.plan.conftest import make_job, make_profile

LAYERS, BATCH = 8, 16
LITTLE = [(0.6, "best"), (0.8, "best"), (1.0, "best"), (0.6, "largest-microbatch")]
"""Shares of the memory of the best plan, and how to choose with so much."""


def printed(p: Prediction) -> str:
    """The word in the table's details."""
    result = re.search(r"recompute (\w+)", details(p))
    return result[1] if result else "none"


def typed(tmp_path, p: Prediction, word: str) -> JobSpec:
    """A job file with the candidate's other keys, and the word after ``--set parallel.recompute=``."""
    c = p.candidate
    given = {
        "schedule": c.schedule, "stages": c.stages, "replicas": c.replicas, "microbatch": c.microbatch,
        "chunks": c.chunks, "pipelines": c.pipelines, "concat": c.concat, "sync": c.sync,
    }  # fmt: skip
    path = tmp_path / "job.json"
    path.write_text(json.dumps(make_job(LAYERS, BATCH, given).model_dump(mode="json", exclude_unset=True)))
    return load_job(path, [f"parallel.recompute={word}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "memory", "words"),
    [
        ("1f1b", LITTLE, set(get_args(Recompute))),
        ("gpipe", LITTLE, set(get_args(Recompute))),
        ("chimera", LITTLE, {"none", "microbatches", "layers"}),
        ("early-recompute", [(1.0, "best")], {"none"}),  # nothing beside its own
    ],
)
def test_each_word_of_the_table_means_the_same_in_a_job(tmp_path, schedule, memory, words) -> None:
    wishes = make_job(LAYERS, BATCH, {"auto": True, "schedule": schedule, "stages": 4, "replicas": 1})
    need = max(choose(wishes, make_profile(LAYERS), search_s=0).best.memory_bytes)
    seen = set()
    for share, policy in memory:
        profile = make_profile(LAYERS, memory_bytes=share * need)
        for row in choose(wishes, profile, search_s=0, policy=policy).rows:
            p = row.prediction
            if p.candidate.schedule != schedule or p.candidate.memory_limit is not None or not p.fits:
                continue
            word = printed(p)
            job = typed(tmp_path, p, word)
            shown = plan_of(p, job)
            if word in PLANNED:
                result = choose(job, profile, search_s=0).best
                assert (printed(result), result.step_s) == (word, p.step_s)
                assert plan_of(result, job) == shown
            else:
                written = Plan.of(job.parallel, shown.cut, BATCH)
                assert build_schedule(written, BATCH) == build_schedule(shown, BATCH)
            seen.add(word)
    assert seen == words


def test_a_plan_that_fits_recomputes_nothing() -> None:
    for word in ("layers", "microbatches"):
        keys = {"schedule": "1f1b", "stages": 4, "replicas": 1, "microbatch": 1, "recompute": word}
        plan = choose(make_job(LAYERS, BATCH, keys), make_profile(LAYERS), search_s=0).plan
        assert (plan.parallel.recompute, plan.parallel.keep) == ("none", None)
