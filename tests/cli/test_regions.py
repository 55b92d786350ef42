"""``raypipe regions``: a profile of a real model of this machine, a plan from it, and the losses of one stream."""

from __future__ import annotations

import json

import pytest

from raypipe.cli import run
from raypipe.cost.profile import TakenFor
from raypipe.job.spec import load_job
from raypipe.plan.plan import build_schedule, load_plan
from raypipe.plan.regions.profile import load_regions
from tests.plan.regions.profiles import made
from tests.runtime.runs.small_runs import drive, small_job

JOB = """\
name: small
model: {type: gpt, layers: 4, hidden: 16, heads: 2, sequence: 16, vocabulary: 256, dropout: 0.1, tie_embeddings: true}
data: {type: bytes, path: TEXT}
train: {steps: 4, batch: 4, lr: 0.01, clip: null}
parallel: {microbatch: 2}
"""


@pytest.fixture
def job_file(text_folder, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("TEXT", str(text_folder)))
    return path


# Crashed once in torch (zero_grad beside a backward of another thread) with two workers of pytest on a busy machine.
@pytest.mark.exhaustive
@pytest.mark.slow
def test_measured_and_planned_on_this_machine(job_file, tmp_path, capsys) -> None:
    profile, plan = tmp_path / "regions.json", tmp_path / "plan.json"
    words = ["regions", str(job_file), "-o", str(profile), "--plan", str(plan), "--regions", "2", "--repeats", "2"]
    assert run([*words, "--memory", "9", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    measured = load_regions(profile)
    assert measured.layers[0].name == "embedding"
    assert len(measured.layers) == 6
    assert measured.tied == ((0, 5),)
    assert all(min(one.forward, one.input_grad, one.weight_grad) > 0 for one in measured.layers)
    assert all(layer.waiting_bytes > 0 for layer in measured.layers)
    assert sorted(n for r in result["regions"] for n in r["weight_gradients"]) == [1, 2, 3, 4, 5]
    job = load_job(job_file)
    assert build_schedule(load_plan(plan), job.train.batch).devices == 1
    assert run(["regions", str(job_file), "--profile", str(profile), "--memory", "9"]) == 0  # without measuring again
    assert "One stream takes" in capsys.readouterr().out


def test_a_profile_of_another_model_is_refused(job_file, tmp_path, capsys) -> None:
    profile = made([(1.0, 1.0, 1.0)] * 4, [0, 2], [0, 2])
    other = profile.model_copy(update={"taken_for": TakenFor(model={"type": "gpt"}, optimizer="adamw")})
    path = tmp_path / "regions.json"
    path.write_text(other.model_dump_json())
    assert run(["regions", str(job_file), "--profile", str(path)]) == 2
    assert "was measured for another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--regions", "0"], "--regions: 0"), (["--repeats", "0"], "--repeats"), (["--memory", "0.5"], "--memory")],
)
def test_wrong_options_are_one_clear_error(words, why, job_file, capsys) -> None:
    assert run(["regions", str(job_file), *words]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.runs
def test_a_plan_with_a_second_stream_trains_as_one_stream(stage_pool, text_folder, tmp_path) -> None:
    """Through the real driver and actors, with validation and checkpoints, and a resume."""
    from raypipe.launch.plans import with_plan
    from raypipe.plan.regions.joint import joint_schedule, plan_of

    often = {"steps": 6, "batch": 4, "clip": None, "eval_every": 3, "checkpoint_every": 2}
    job = small_job(text_folder, {}, **often)
    usual = drive(job, stage_pool, tmp_path / "usual")
    gain = {(r, n): 1.2 + 0.4 * (r == 2) for r in range(4) for n in range(1, 6)}  # most beside the first forwards
    profile = made([(1.0, 1.0, 0.5)] * 6, [0, 3], [0, 3], gain, tied=((0, 5),)).model_copy(update={"microbatch": 2})
    plan = plan_of(job, profile, joint_schedule(profile, 9.0))
    assert plan.parallel.side_stream
    done = drive(with_plan(job, plan), stage_pool, tmp_path / "done", plan=plan)
    assert done.losses == pytest.approx(usual.losses, abs=1e-9, rel=0)
    assert done.val_losses == pytest.approx(usual.val_losses, abs=1e-9, rel=0)
    norms, expected = ([row["grad_norm"] for row in one.rows] for one in (done, usual))
    assert norms == pytest.approx(expected, rel=1e-9)
    again = drive(with_plan(job, plan), stage_pool, tmp_path / "again", done.checkpoints[4], 4, plan=plan)
    assert again.losses == pytest.approx(usual.losses[4:], abs=1e-9, rel=0)
