"""The job that `make train` runs keeps to what the README and the contract say of it."""

from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.job import load_job

QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"


def quickstart(*words: str):
    return load_job(QUICKSTART, words)


def test_the_quickstart_job_leaves_its_plan_to_the_planner():
    job = quickstart()
    assert (job.name, job.data.path) == ("quickstart", "stdlib")
    assert job.parallel.auto
    assert job.parallel.given == {}
    assert job.train.batch % 16 == 0  # the planner has micro-batches of 1 to 16 to choose from
    assert job.train.steps % job.train.checkpoint_every == 0


def test_a_plan_can_be_given_instead():
    given = ["parallel.schedule=gpipe", "parallel.stages=2", "parallel.microbatch=4"]
    job = quickstart(*given)
    assert not job.parallel.auto
    assert (job.parallel.schedule, job.parallel.devices, job.microbatches) == ("gpipe", 2, 8)
    assert quickstart(*given, "parallel.tensor=2").parallel.devices == 4
    part = quickstart("parallel.stages=2").parallel
    assert part.auto
    assert part.given == {"stages": 2}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("parallel.stages=5", "5 stages for a model of 4 layers"),
        ("parallel.microbatch=5", "32 is not divisible by microbatch = 5"),
        ("parallel.replicas=3", "times replicas = 3"),
        ("parallel.placement=ring", "cannot be given if the planner chooses"),
    ],
)
def test_what_no_plan_can_have_is_refused_before_anything_is_measured(word, why):
    with pytest.raises(SpecError, match=why):
        quickstart(word)


def test_a_run_goes_on_with_the_plan_it_has_unless_another_is_asked_for():
    plan = quickstart("parallel.schedule=1f1b", "parallel.stages=2", "parallel.microbatch=4").parallel
    for same in ([], ["parallel.stages=2"], ["parallel.schedule=dapple"], ["parallel.recompute=full"]):
        assert quickstart(*same).parallel.allows(plan)
    for other in ("parallel.stages=1", "parallel.schedule=zb-h1", "parallel.microbatch=8"):
        assert not quickstart(other).parallel.allows(plan)
