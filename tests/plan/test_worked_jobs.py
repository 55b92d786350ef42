"""The worked jobs of `auto`: each is planned as its comment says."""

from pathlib import Path

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.profile import Profile
from raypipe.job import load_cluster, load_job
from raypipe.job.model_spec import GptSpec
from raypipe.job.spec import JobSpec
from raypipe.plan.choose import Decision, choose

ROOT = Path(__file__).parents[2]
MACHINES = {
    "data-parallel": ("h100", 4), "sharded": ("a100", 8), "pipelined": ("rtx3090-ethernet", 8),
    "hybrid": ("rtx3090-ethernet", 8),
}  # fmt: skip
"""Job -> kind of device, and how many of them."""


def costed(name: str) -> tuple[JobSpec, Profile]:
    """The job, and what its model costs on the devices that its comment names."""
    machine, devices = MACHINES[name]
    job = load_job(ROOT / "jobs" / f"auto-{name}.yaml")
    assert isinstance(job.model, GptSpec)
    cluster = load_cluster(ROOT / "cluster" / "devices" / f"{machine}.yaml").resized(devices)
    return job, analytic_profile(job.model, cluster, job.train.dtype)


def planned(name: str) -> Decision:
    return choose(*costed(name), search_s=0)


def test_a_small_model_is_copied_whole() -> None:
    best = planned("data-parallel").best.candidate
    assert (best.stages, best.replicas, best.shard) == (1, 4, "none")


@pytest.mark.slow
def test_a_model_that_no_device_holds_is_divided() -> None:
    decision = planned("sharded")
    best = decision.best.candidate
    assert (best.stages, best.replicas, best.shard) == (1, 8, "zero3")


@pytest.mark.slow
def test_a_slow_link_gets_a_pipeline() -> None:
    best = planned("pipelined").best.candidate
    assert (best.stages, best.replicas, best.shard) == (8, 1, "none")


@pytest.mark.slow
def test_a_model_in_between_is_cut_and_copied() -> None:
    decision = planned("hybrid")
    best = decision.best.candidate
    assert best.stages > 1
    assert best.replicas > 1
    assert best.innermost == "replicas"
    assert "stages on different hosts" in decision.rows[0].why
