"""Without a barrier at the optimizer, layer by layer: the losses of a plain PyTorch loop, float64, 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.observe.run_log import EVENTS, event_sentences, read_rows
from tests.exhaustive import crossed, exhaustive
from tests.runtime.runs.plain_training import losses_alone
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 6
PLANS: list[dict[str, Any]] = [
    {"replicas": 2},
    {"replicas": 4},
    {"stages": 2, "replicas": 2},
    {"stages": 2, "replicas": 4},
    {"schedule": "zb-h1", "stages": 2, "replicas": 2},
    {"schedule": "chimera", "stages": 2, "replicas": 2},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2, "recompute": "full"},
]


@pytest.fixture(scope="module")
def reference(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    job = small_job(text_folder, {}, steps=STEPS)
    return losses_alone(job, tmp_path_factory.mktemp("reference"))


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "sync"), crossed(PLANS, ["prioritised", "reverse-first-k"]),
    ids=lambda p: p if isinstance(p, str) else "-".join(str(v) for v in p.values()),
)  # fmt: skip
def test_losses_of_plain_pytorch(parallel, sync, reference, stage_pool, text_folder, tmp_path) -> None:
    first_k = {"first_k": 3} if sync == "reverse-first-k" else {}
    job = small_job(text_folder, {"sync": sync, **first_k, **parallel}, steps=STEPS)
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(reference, abs=1e-9, rel=0)
    assert [row["step"] for row in done.rows] == list(range(1, STEPS + 1))


@pytest.mark.runs
@pytest.mark.parametrize("dtype", [*exhaustive("bfloat16"), "bfloat16-true"])
def test_casts_and_master_weights_follow_each_layer(dtype, stage_pool, text_folder, tmp_path) -> None:
    """Two replicas' sums are the same in any pieces, and so are all losses."""
    kinds = {"usual": {}, "done": {"sync": "prioritised"}}
    losses = [
        drive(small_job(text_folder, {"replicas": 2, **sync}, dtype=dtype), stage_pool, tmp_path / name).losses
        for name, sync in kinds.items()
    ]
    assert losses[1] == losses[0]


@pytest.mark.runs
def test_a_k_that_is_chosen_while_the_run_goes_on(stage_pool, text_folder, tmp_path) -> None:
    """Whatever it is, and whether or not it is taken back, the losses stay."""
    usual = drive(small_job(text_folder, {"replicas": 2}, steps=20), stage_pool, tmp_path / "usual")
    job = small_job(text_folder, {"replicas": 2, "sync": "reverse-first-k"}, steps=20)
    assert drive(job, stage_pool, tmp_path / "done").losses == pytest.approx(usual.losses, abs=1e-9, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize(("cap_mb", "k"), [(1, 0), (1e6, 3)])
def test_memory_limits_k(cap_mb, k, reference, stage_pool, text_folder, tmp_path) -> None:
    """A worker's heap alone is above 1 MiB; the run says what became of its k."""
    job = small_job(
        text_folder, {"replicas": 2, "sync": "reverse-first-k", "first_k": 3, "memory_cap_mb": cap_mb}, steps=STEPS
    )
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(reference, abs=1e-9, rel=0)
    (told,) = (row for row in read_rows(tmp_path / EVENTS) if row["event"] == "first_k")
    assert (told["step"], told["stage"], told["k"]) == (4, 0, k)
    assert told["most"] == (0 if k == 0 else told["most"])
    assert event_sentences(told)[0].endswith(f"the first {k} layers of stage 0 wait; memory allows {told['most']}")


@pytest.mark.runs
@pytest.mark.parametrize("sync", ["prioritised", "reverse-first-k"])
def test_validation_checkpoints_and_norms_are_those_of_a_barrier(sync, stage_pool, text_folder, tmp_path) -> None:
    """And a checkpoint between two steps holds all updates of the first: a run goes on from it."""
    often = {"steps": STEPS, "eval_every": 2, "checkpoint_every": 2, "optimizer": "sgd", "momentum": 0.9}
    usual = drive(small_job(text_folder, {"replicas": 2}, **often), stage_pool, tmp_path / "usual")
    job = small_job(text_folder, {"replicas": 2, "sync": sync}, **often)
    done = drive(job, stage_pool, tmp_path / "done")
    assert done.val_losses == pytest.approx(usual.val_losses, abs=1e-9, rel=0)
    norms, expected = ([row["grad_norm"] for row in one.rows] for one in (done, usual))
    assert norms == pytest.approx(expected, rel=1e-9)
    assert all(row["step_s"] > 0 for row in done.rows)
    again = drive(job, stage_pool, tmp_path / "again", done.checkpoints[4], 4)
    assert again.losses == pytest.approx(usual.losses[4:], abs=1e-9, rel=0)
