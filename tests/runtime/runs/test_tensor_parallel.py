"""Tensor parallelism under the pipeline, with real actors: the curve of plain PyTorch; checkpoints for any T."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.checkpoint import open_checkpoint
from raypipe.errors import SpecError
from raypipe.job.cluster import cluster_from
from raypipe.job.spec import JobSpec, job_from
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.partition.job_costs import job_profile, shared_profiles
from raypipe.plan.choose import choose
from raypipe.plan.decision_json import as_json
from raypipe.runtime.driver import Driver
from raypipe.train import make_plan, prepare_run
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 4


@pytest.fixture(scope="module")
def reference(text_folder: Path, tmp_path_factory: pytest.TempPathFactory, stage_pool) -> list[float]:
    """One device; that it gives plain PyTorch's curve is test_exactness's business."""
    return drive(small_job(text_folder, {}, clip=0.5), stage_pool, tmp_path_factory.mktemp("alone")).losses


HALFWAY = {"steps": STEPS, "checkpoint_every": 2, "clip": 0.5}

PLANS = [
    {"schedule": "zb-h1", "stages": 2},
    {"schedule": "chimera", "stages": 2},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "sync": "eager"},
    {"schedule": "early-recompute", "stages": 2, "sub_pipelined": True},
    {"schedule": "1f1b", "stages": 1, "replicas": 2, "shard": "zero3"},
    {"schedule": "zb-h1", "stages": 2, "sequence_parallel": True},
    *exhaustive(
        {"schedule": "chimera", "stages": 2, "sequence_parallel": True, "sub_pipelined": True, "microbatch": 4},
        {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "zero2", "sequence_parallel": True},
        {"schedule": "1f1b", "stages": 1}, {"schedule": "1f1b", "stages": 2},
        {"schedule": "zb-h1", "stages": 2, "replicas": 2, "shard": "zero1"},
        {"schedule": "zeropp", "stages": 2, "replicas": 2, "shard": "zero3"},
        {"schedule": "chimera", "stages": 2, "shard": "zero2"},
        {"schedule": "zb-h1", "stages": 2, "sub_pipelined": True},
    ),
]  # fmt: skip


@pytest.mark.runs
@pytest.mark.parametrize("parallel", PLANS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_the_curve_is_that_of_one_device(parallel, reference, stage_pool, text_folder, tmp_path) -> None:
    """Tied embeddings, dropout, AdamW, split backward, both directions; clipping: the norm counts each value once."""
    job = small_job(text_folder, {**parallel, "tensor": 2}, clip=0.5)
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(reference, abs=1e-9, rel=0)
    counts = done.driver.counts
    # Per micro-batch: two sums a block each way, the embedding's and none of its way back, the head's way back and the
    # loss's two.
    once = (2 * 2 * 4 + 1 + 1 + 2) * 4
    if "sequence_parallel" in parallel:  # the gradients of norms and biases, and the loss's two
        once = (4 * 6 + 2 + 2) * 8 // parallel.get("microbatch", 2)
    if parallel["schedule"] == "early-recompute":
        assert counts["tensor_all_reduce"] > once * 2
    else:
        assert counts["tensor_all_reduce"] == once * (1 + ("sub_pipelined" in parallel))
    assert not [e for e in read_rows(tmp_path / EVENTS) if e["event"] == "notice"]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tensor": 2}, {"stages": 2, "tensor": 2}),
        ({"tensor": 2, "replicas": 2, "shard": "zero2"}, {}),
        ({}, {"tensor": 2, "replicas": 2, "shard": "zero3"}),
        *exhaustive(({"stages": 2, "tensor": 2}, {}), ({}, {"stages": 1, "tensor": 2})),
    ],
    ids=["moved", "joined shards", "divided shards", "joined", "divided"],
)
def test_a_checkpoint_is_of_whole_parameters(before, after, reference, stage_pool, text_folder, tmp_path) -> None:
    first = drive(small_job(text_folder, before, **HALFWAY), stage_pool, tmp_path / "first")
    checkpoint = open_checkpoint(first.checkpoints[2])
    assert {key: tuple(t.shape) for key, t in checkpoint.read(checkpoint.keys).items() if "token" in key} == {
        f"{key}": (256, 16) if key[-4:] != "step" else ()
        for key in ("param/0.token.weight", *(f"optim/0.token.weight/{k}" for k in ("exp_avg", "exp_avg_sq", "step")))
    }
    if before.get("tensor", 1) > 1:  # the members share the work of writing
        writers = before.get("stages", 1) * (before["replicas"] if "shard" in before else 1)
        assert len(set(checkpoint.files.values())) == 2 * writers
    rest = drive(
        small_job(text_folder, after, **HALFWAY),
        stage_pool,
        tmp_path / "second",
        checkpoint=first.checkpoints[2],
        done=2,
    )
    assert first.losses[:2] + rest.losses == pytest.approx(reference, abs=1e-9, rel=0)
    assert rest.val_losses == pytest.approx(first.val_losses, abs=1e-9, rel=0)


CAPTURED = {
    "hf": "gpt2", "config": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 257, "n_positions": 16,
                             "tie_word_embeddings": False},
    "sequence": 16,
}  # fmt: skip
MACHINE = {
    "name": "four cores", "hosts": 1, "devices_per_host": 4, "inside": {"latency_us": 10, "bandwidth_gb_s": 10},
    "device": {"name": "core", "memory_gib": 4, "peak_tflops": {"float64": 0.05}, "memory_gb_s": 10, "efficiency": 1},
}  # fmt: skip


def captured_job(text: Path, parallel: dict[str, Any]) -> JobSpec:
    job = small_job(text, {}, clip=0.5, steps=2)
    return job_from({**job.model_dump(), "model": CAPTURED, "parallel": parallel})


@pytest.mark.runs
def test_a_captured_model_is_divided_too(stage_pool, text_folder, tmp_path) -> None:
    """With dropout of attention weights, of which each member has its heads', and a vocabulary that does not divide; as
    the job says, and by a plan file that the planner wrote."""

    def run(parallel: dict[str, Any]) -> list[float]:
        job = captured_job(text_folder, {"stages": 2, "microbatch": 2, **parallel})
        return drive(job, stage_pool, tmp_path / str(len(parallel))).losses

    expected = run({})
    assert run({"schedule": "zb-h1", "tensor": 2}) == pytest.approx(expected, abs=1e-9, rel=0)
    both = {"schedule": "zb-h1", "tensor": 2, "sequence_parallel": True}
    assert run(both) == pytest.approx(expected, abs=1e-9, rel=0)

    job = captured_job(text_folder, {"auto": True, "stages": 2, "tensor": 2, "sub_pipelined": True})
    cluster = cluster_from(MACHINE)
    decision = choose(job, job_profile(job, cluster), search_s=0, shared=shared_profiles(job, cluster))
    assert decision.plan.parallel.sequence_parallel  # nothing speaks against it
    decision.plan.save(tmp_path / "plan.json")
    prepared = prepare_run(job, tmp_path / "run", resume=False, plan_file=tmp_path / "plan.json")
    driver = Driver(prepared.job, prepared.plan, tmp_path / "run", RunLog(tmp_path / "run"), lambda *_: None)
    driver.run(stage_pool(driver.schedule.devices * 2), None, 0)
    losses = [row["loss"] for row in read_rows(tmp_path / "run" / METRICS) if "loss" in row]
    assert losses == pytest.approx(expected, abs=1e-9, rel=0)
    held = decision.best.memory_bytes
    assert decision.plan.parallel.devices == 4
    assert as_json(decision)["candidates"][0]["memory_bytes"] == [held[0], held[0], held[1], held[1]]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 3}, r"1.qkv: 2 heads do not divide over tensor = 3\n  fix: use tensor: 2"),
        ({"tensor": 2, "update": "optimistic"}, "optimistic cannot be combined with tensor: 2"),
        ({"tensor_table": "mine.yaml"}, "no layer is divided with tensor: 1"),
        ({"sub_pipelined": True}, "no all-reduce to overlap with tensor: 1"),
        ({"sequence_parallel": True}, "no layer is divided with tensor: 1"),
        (
            {"tensor": 2, "sequence_parallel": True, "context": 2, "replicas": 2},
            "sequence_parallel: cannot be combined with context: 2",
        ),
        ({"tensor": 2, "sub_pipelined": True, "microbatch": 1}, "do not divide into halves"),
        ({"tensor": 2, "sub_pipelined": True, "schedule": "pipedream-2bw"}, "several versions of the weights"),
        ({"tensor": 2, "tensor_table": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
    ],
)
def test_what_does_not_go_is_refused(parallel, message, text_folder) -> None:
    with pytest.raises(SpecError, match=message):
        make_plan(small_job(text_folder, parallel))
