"""Sharded data parallelism changes what devices hold, and no number of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Sharding
from raypipe.search.gather_positions import search_gathers
from raypipe.train import make_plan
from tests.exhaustive import crossed, exhaustive
from tests.runtime.runs.plain_training import losses_alone
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 4
PLANS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "stages": 1, "replicas": 2},
    {"schedule": "gpipe", "stages": 2, "replicas": 2, "gather": "microbatch"},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2},
    {"schedule": "zb-h1", "stages": 2, "replicas": 2, "gather": "step"},
    {"schedule": "zb-v", "stages": 2, "replicas": 2, "gather": "microbatch"},
    {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 2, "replicas": 2},
    {"schedule": "1f1b", "stages": 2, "replicas": 4, "shard_replicas": 2, "microbatch": 1},
    {"schedule": "chimera", "stages": 2, "replicas": 2, "gather": "microbatch"},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "recompute": "full", "gather": "microbatch"},
]
MORE: list[dict[str, Any]] = [
    {"schedule": "1f1b", "stages": 1, "replicas": 4},
    {"schedule": "1f1b", "stages": 2, "replicas": 2},
]
SHARDS = ["zero3", "zero1", "zero2"]


def job(text: Path, parallel: dict[str, Any], **train: Any) -> Any:
    options = {"steps": STEPS, "batch": 8, "clip": 1.0, "weight_decay": 0.1, **train}
    return small_job(text, {"microbatch": 2, **parallel}, model={"layers": 4}, **options)


@pytest.fixture(scope="module")
def plain(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss curve of plain PyTorch."""
    return losses_alone(job(text_folder, {"stages": 1}), tmp_path_factory.mktemp("plain"))


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "shard"), [*crossed(PLANS, SHARDS), *exhaustive(*product(MORE, SHARDS))],
    ids=lambda p: p if isinstance(p, str) else "-".join(str(v) for v in p.values()),
)  # fmt: skip
def test_loss_curve_is_that_of_plain_pytorch(parallel, shard, plain, stage_pool, text_folder, tmp_path) -> None:
    done = drive(job(text_folder, {**parallel, "shard": shard}), stage_pool, tmp_path)
    assert done.losses == pytest.approx(plain, abs=1e-9, rel=0)
    counts = done.driver.counts
    assert counts["all_gather"] > 0
    assert counts["reduce_scatter"] > 0


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel", [{"shard_replicas": 2, "replicas": 4, "microbatch": 1}, *exhaustive({})], ids=["pairs", "all"]
)
def test_searched_gathers_change_no_loss(parallel, plain, stage_pool, text_folder, tmp_path) -> None:
    """Room for four of gathered stages and full gradients: some stages are kept, others gathered several times."""
    zeropp = {"schedule": "zeropp", "stages": 1, "chunks": 3, "unit": 1, "replicas": 2, "shard": "zero3", **parallel}
    named = job(text_folder, zeropp)
    plan = make_plan(named)
    group = plan.parallel.shard_replicas
    result = search_gathers(
        [plan.order()], [[4.0]], replace(CostTable.even(3), gather=(2.0,) * 3, reduce_scatter=(1.0,) * 3),
        [1.0] * 3, sharding=Sharding(levels=(3,) * 3, group=group),
    ).schedule  # fmt: skip
    gathers = [t.stage for t in result.orders[0] if t.kind == "AG"]
    assert 3 < len(gathers) < 2 * 3 * result.microbatches
    own = job(text_folder, {**zeropp, "gather": "order"})
    done = drive(own, stage_pool, tmp_path, plan=plan.remade(8, result, gather="order"))
    assert done.losses == pytest.approx(plain, abs=1e-9, rel=0)
    shards = named.parallel.replicas // (group or named.parallel.replicas)
    assert done.driver.counts["all_gather"] == shards * len(gathers)


@pytest.mark.runs
@pytest.mark.parametrize("shard", [*exhaustive("zero1"), "zero3"])
def test_pieces_of_norms_and_biases_do_not_decay(shard, stage_pool, text_folder, tmp_path) -> None:
    """An optimizer sees flat pieces; what decays follows from the parameters that they are pieces of."""
    train = {"decay": "matrices", "weight_decay": 3.0}
    parallel = {"stages": 1, "replicas": 4, "shard": shard}
    whole = drive(job(text_folder, {"stages": 1}, **train), stage_pool, tmp_path / "whole")
    divided = drive(job(text_folder, parallel, **train), stage_pool, tmp_path / "divided")
    assert divided.losses == pytest.approx(whole.losses, abs=1e-9, rel=0)
    all_decay = drive(job(text_folder, parallel, **{**train, "decay": "all"}), stage_pool, tmp_path / "all")
    assert all_decay.losses != pytest.approx(whole.losses, abs=1e-6, rel=0)


CHANGES = [
    ({"stages": 2, "replicas": 2, "shard": "zero3"}, {"stages": 1}),
    ({"stages": 1}, {"stages": 2, "replicas": 2, "shard": "zero3"}),
    ({"stages": 1, "replicas": 4, "shard": "zero2"}, {"stages": 2, "replicas": 2, "shard": "zero1"}),
]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("plans", "optimizer"), crossed(CHANGES, [{}, {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}]), ids=str
)
def test_a_checkpoint_continues_under_any_plan(
    plans: tuple[dict[str, Any], dict[str, Any]], optimizer: dict[str, Any], stage_pool: Callable[[int], Any],
    text_folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    before, after = plans
    train = {"checkpoint_every": 2, **optimizer}
    whole = drive(job(text_folder, {"stages": 1}, **train), stage_pool, tmp_path / "whole")
    first = drive(job(text_folder, before, **train), stage_pool, tmp_path / "first")
    rest = drive(
        job(text_folder, after, **train), stage_pool, tmp_path / "rest", checkpoint=first.checkpoints[2], done=2
    )
    assert rest.losses == pytest.approx(whole.losses[2:], abs=1e-9, rel=0)
    assert rest.val_losses == pytest.approx(whole.val_losses, abs=1e-9, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "gathers"),
    [
        # Per device: B micro-batches of a copy, V stages, units of U micro-batches (ZeroPP, section 3.3).
        ({"schedule": "1f1b", "gather": "microbatch", "microbatch": 1}, 2 * 4),
        ({"schedule": "bfs", "chunks": 2, "microbatch": 1}, 2 * 2 - 1),
        ({"schedule": "zeropp", "chunks": 2, "unit": 2, "microbatch": 1}, 4 // 2 * (2 * 2 - 1)),
    ],
    ids=["FS-1F1B", "FS-BFSPP", "FS-ZeroPP"],
)
def test_gathers_of_a_step_are_the_papers(parallel, gathers, stage_pool, text_folder, tmp_path) -> None:
    """Each gathers a stage, L / (P V) layers; formulas: 2BL/P, L(2V-1)/(PV), BL(2V-1)/(UPV)."""
    stages, replicas = 2, 2
    done = drive(
        job(text_folder, {**parallel, "stages": stages, "replicas": replicas, "shard": "zero3"}, steps=2),
        stage_pool, tmp_path,
    )  # fmt: skip
    assert done.driver.counts["all_gather"] == stages * gathers
