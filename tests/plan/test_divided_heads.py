"""Plans that divide the head: chosen where a whole one is too large or too slow, and predicted as any other plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.errors import SpecError
from raypipe.job.cluster import load_cluster
from raypipe.job.spec import JobSpec
from raypipe.plan.choice import choice_of
from raypipe.plan.choose import Decision, choose
from raypipe.plan.divided_heads import _Heads
from raypipe.plan.plan import build_schedule
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.schedule.families.vocabulary import graph_of
from raypipe.simulate.engine import simulate
from tests.job_files import minimal_job
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.small_runs import drive, small_job

GB = 1e9
A100 = load_cluster(Path("cluster/devices/a100.yaml"))


def job_with(parallel: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **train: Any) -> JobSpec:
    """Sixteen blocks 2,048 wide with Llama 3's vocabulary, on one row of eight devices."""
    shape = {"layers": 16, "hidden": 2048, "heads": 16, "sequence": 4096, "vocabulary": 128256}
    return minimal_job(
        {"type": "gpt", "tie_embeddings": False, **shape, **(model or {})},
        parallel={"auto": True, "stages": 8, "replicas": 1, "tensor": 1, **(parallel or {})},
        **{"batch": 32, "dtype": "bfloat16-true", **train},
    )


def chosen(job: JobSpec, memory_gb: float, devices: int = 8) -> Decision:
    profile = analytic_profile(job.model, A100, job.train.dtype, [1, 2])
    return choose(job, profile.model_copy(update={"memory_bytes": memory_gb * GB}), devices, search_s=0)


@pytest.fixture(scope="module")
def in_little() -> Decision:
    return chosen(job_with(), 20)


def test_it_is_chosen_where_a_whole_head_fits_but_once(in_little: Decision) -> None:
    """Two pipelines would balance the devices, and need two heads; then nothing needs to be divided."""
    assert in_little.plan.parallel.vocabulary == "split"
    other = chosen(job_with({"vocabulary": "whole"}), 20)
    assert in_little.best.step_s < other.best.step_s / 1.3
    asked = chosen(job_with({"vocabulary": "split"}), 20)
    assert asked.searched == asked.timed == 2  # micro-batches of one sample, and of two
    roomy = chosen(job_with(), 80)
    assert roomy.plan.parallel.vocabulary == "whole"
    assert roomy.best.step_s < in_little.best.step_s


def test_it_is_chosen_where_no_whole_head_fits() -> None:
    """Logits of 16,384 tokens take more than all else."""
    long = {"sequence": 16384}
    made = chosen(job_with({"slices": 1, "context": 1}, long), 24)
    assert made.plan.parallel.vocabulary == "split"
    assert made.best.fits
    with pytest.raises(SpecError, match=r"no plan fits.*device 7 \(layers 17 to 17\)"):
        chosen(job_with({"slices": 1, "context": 1, "vocabulary": "whole"}, long), 24)


def test_the_plan_is_predicted_as_the_candidate(in_little: Decision) -> None:
    """From its file alone; a step without sums and updates is that of the simulator."""
    plan, best, job = in_little.plan, in_little.best, job_with()
    build_schedule(plan, job.train.batch)
    assert plan.one_copy().graph == graph_of(8)
    assert [layer for part in plan.cut for layer in part] == list(range(16 + 2 + 8 + 1))
    profile = analytic_profile(job.model, A100, job.train.dtype, [1, 2])
    own = PlanPredictor(job, profile).predict(plan)
    assert own.step_s == pytest.approx(best.step_s, rel=1e-9)
    assert [device.total for device in own.memory] == pytest.approx(list(best.memory_bytes), rel=1e-9)
    assert best.order is not None
    assert best.compute_s <= simulate(best.order, own.costs).makespan * (1 + 1e-9)
    assert in_little.rows[0].certificate is None, "bounds are of plans whose layers are whole"


def test_no_step_is_shorter_than_its_bound() -> None:
    job = job_with({"stages": 4})
    heads = _Heads(choice_of(job, analytic_profile(job.model, A100, job.train.dtype, [1, 2]), 4))
    made = [(grid, p) for grid in heads.grids()[:4] for p in heads.plans(grid)]
    assert made
    assert all(heads.least(grid) <= p.step_s for grid, p in made)


@pytest.mark.parametrize(
    ("parallel", "model", "train", "why"),
    [
        ({}, {"tie_embeddings": True}, {}, "is tied to another layer"),
        ({}, {}, {"compile": "inductor"}, "inductor runs whole logits"),
        ({"shard": "zero1"}, {}, {}, "no plan with these keys"),
        (
            {"stages": 4, "replicas": 2, "context": 2},
            {},
            {},
            "copies that divide experts or sequences have whole heads",
        ),
        ({"schedule": "zb-h1"}, {}, {}, "no plan with these keys"),
    ],
)
def test_why_none_divides_it(parallel: dict[str, Any], model: dict[str, Any], train: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        chosen(job_with({**parallel, "vocabulary": "split"}, model, **train), 20)


@pytest.mark.runs
def test_a_run_of_the_plan_has_the_losses_of_plain_pytorch(stage_pool, text_folder, tmp_path) -> None:
    wish = {"auto": True, "vocabulary": "split", "stages": 2, "recompute": "full"}
    job = small_job(text_folder, wish, {"tie_embeddings": False})
    plan = chosen(job, 80, 2).plan
    assert plan.parallel.vocabulary == "split"
    assert plan.parallel.recompute == "full"
    job = job.model_copy(update={"parallel": plan.parallel})
    done = drive(job, stage_pool, tmp_path / "run", plan=plan)
    assert done.losses == pytest.approx(plain_losses(job, tmp_path / "run" / "data", job.train.steps), abs=1e-9, rel=0)


def test_copies_that_divide_their_state_divide_heads_too() -> None:
    """Where it only fits so, or is asked for; from its file alone, the plan is predicted as it was."""
    shape = {"stages": 4, "replicas": 2, "vocabulary": "split"}
    with pytest.raises(SpecError, match="no plan with these keys divides the head and fits"):
        chosen(job_with({**shape, "shard": "none"}), 14)
    for more, memory_gb in (({}, 14), ({"shard": "zero3", "gather": "microbatch"}, 80)):
        job = job_with({**shape, **more})
        decision = chosen(job, memory_gb)
        plan, best = decision.plan, decision.best
        assert plan.parallel.shard == more.get("shard", best.candidate.shard) != "none"
        assert best.fits
        assert build_schedule(plan, job.train.batch).sharding is not None
        own = PlanPredictor(job, analytic_profile(job.model, A100, job.train.dtype, [1, 2])).predict(plan)
        assert own.step_s == pytest.approx(best.step_s, rel=1e-9)
        assert [device.total for device in own.memory] == pytest.approx(list(best.memory_bytes), rel=1e-9)
