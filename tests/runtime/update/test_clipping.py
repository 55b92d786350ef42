"""Clipping by global norm without a wait: optimistic updates, undone where the norm says so, change no bit of a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.exhaustive import crossed, exhaustive
from tests.runtime.runs.plain_training import losses_alone
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 6
# Gradient norms of the six steps are 2.92, 1.38, 1.11, 1.37, 1.20 and 1.32, a little differently with each clip.
CLIPS = {"never": (1e6, []), "sometimes": (1.25, [1, 2, 4, 6]), "always": (0.01, [1, 2, 3, 4, 5, 6])}
"""What to clip at, and in which steps it clips."""
OFTEN = ["sometimes", "always"]
PLANS: list[dict[str, Any]] = [
    {"schedule": "zb-h2", "stages": 2},
    {"schedule": "zb-v", "stages": 2, "replicas": 2, "transport": "gloo"},
    {"schedule": "zb-v", "stages": 4},
    {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 3},
]
MORE: list[dict[str, Any]] = [
    {"schedule": "zb-h2", "stages": 4, "replicas": 2},
    {"schedule": "zeropp", "stages": 4, "unit": 4},
]


@dataclass(frozen=True)
class Run:
    """What a run says of its numbers."""

    job: Any
    losses: list[float]
    rows: list[tuple[float | None, ...]]
    """Loss, gradient norm and validation loss, in the order of the log."""
    undone: list[int]
    """Steps whose update was undone."""


def run(text: Path, pool: Any, directory: Path, parallel: dict[str, Any], **train: Any) -> Run:
    """Tied embeddings, dropout, AdamW, float64; stops for a validation and a checkpoint in the middle."""
    job = small_job(
        text, {"microbatch": 1, **parallel}, model={"layers": 8},
        **{"steps": STEPS, "batch": 16, "eval_every": 4, "checkpoint_every": 2, "seed": 7, **train},
    )  # fmt: skip
    done = drive(job, pool, directory)
    rows = [(r.get("loss"), r.get("grad_norm"), r.get("val_loss")) for r in read_rows(directory / METRICS)]
    return Run(job, done.losses, rows, [e["step"] for e in read_rows(directory / EVENTS) if e["event"] == "undone"])


@pytest.fixture(scope="module")
def own_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's licence: gradient norms are those of CLIPS whatever Python runs the tests."""
    folder = tmp_path_factory.mktemp("licence")
    (folder / "licence.txt").write_bytes((Path(__file__).parents[3] / "LICENSE").read_bytes())
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[float, list[float]]:
    """Loss curves of plain PyTorch, by clip."""
    return {}


def same_as_plain(found: Run, data: Path, plain: dict[float, list[float]]) -> bool:
    clip = found.job.train.clip
    if clip not in plain:
        plain[clip] = losses_alone(found.job, data)
    return found.losses == pytest.approx(plain[clip], abs=1e-9, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "clip"), [*crossed(PLANS, OFTEN), *exhaustive(*product(MORE, OFTEN))],
    ids=lambda p: p if isinstance(p, str) else "-".join(str(v) for v in p.values()),
)  # fmt: skip
def test_undone_updates_change_nothing(parallel, clip, plain, stage_pool, own_text, tmp_path) -> None:
    """Every update is made before its norm is known; wrong ones would show in the next loss."""
    limit, clipped = CLIPS[clip]
    result = run(own_text, stage_pool, tmp_path, parallel | {"update": "optimistic"}, clip=limit)
    assert result.undone == clipped
    assert same_as_plain(result, tmp_path / "plain", plain)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "train"),
    [(PLANS[2], {"optimizer": "sgd", "momentum": 0.9, "lr": 0.3, "clip": 1.2}), *exhaustive((MORE[0], {}))],
    ids=["zb-v-sgd", "zb-h2-adamw"],
)
def test_to_the_last_bit_as_if_waited_for(parallel, train, stage_pool, own_text, tmp_path) -> None:
    train = {"clip": CLIPS["sometimes"][0]} | train
    wait, optimistic, auto = (
        run(own_text, stage_pool, tmp_path / rule, parallel | {"update": rule}, **train)
        for rule in ("wait", "optimistic", "auto")
    )
    assert optimistic.rows == wait.rows
    assert auto.rows == wait.rows
    clipped = [norm > train["clip"] for _, norm, _ in wait.rows if norm is not None]
    assert {True, False} == set(clipped)
    assert wait.undone == []
    assert optimistic.undone == [step for step, clips in enumerate(clipped, 1) if clips]
    # Only what follows a step without clipping is made early.
    assert auto.undone == [step for step in optimistic.undone if step > 1 and not clipped[step - 2]] != []


@pytest.mark.runs
def test_updates_that_stand(plain, stage_pool, own_text, tmp_path) -> None:
    result = run(own_text, stage_pool, tmp_path, PLANS[1] | {"update": "optimistic"}, clip=CLIPS["never"][0])
    assert not result.undone
    assert same_as_plain(result, tmp_path / "plain", plain)


@pytest.mark.runs
def test_a_schedule_that_gains_nothing_by_it_can_be_made_to(plain, stage_pool, own_text, tmp_path) -> None:
    parallel = {"schedule": "chimera", "stages": 4, "update": "optimistic"}
    result = run(own_text, stage_pool, tmp_path, parallel, clip=CLIPS["sometimes"][0])
    assert result.undone == CLIPS["sometimes"][1]
    assert same_as_plain(result, tmp_path / "plain", plain)


@pytest.mark.runs
@pytest.mark.parametrize("parallel", [{"stages": 1, "replicas": 2}, {"schedule": "chimera", "stages": 2}], ids=str)
def test_devices_that_hold_every_stage_clip_alike(parallel, plain, stage_pool, own_text, tmp_path) -> None:
    """Nobody tells anybody its norm there: each clips by what it sees, and their weights stay the same."""
    result = run(own_text, stage_pool, tmp_path, parallel, clip=CLIPS["sometimes"][0])
    assert same_as_plain(result, tmp_path / "plain", plain)
    norms = [norm for _, norm, _ in result.rows if norm is not None]
    assert [step for step, norm in enumerate(norms, 1) if norm > CLIPS["sometimes"][0]] == CLIPS["sometimes"][1]


@pytest.mark.runs
def test_a_restart_finds_the_weights_of_certain_updates(stage_pool, own_text, tmp_path) -> None:
    """A checkpoint is taken while the update before it is still pending; it must be the clipped one."""
    parallel = PLANS[0] | {"update": "optimistic", "microbatch": 1}
    job = small_job(own_text, parallel, model={"layers": 8}, steps=STEPS, batch=16, clip=0.01, checkpoint_every=2)
    whole = drive(job, stage_pool, tmp_path / "whole")
    rest = drive(job, stage_pool, tmp_path / "rest", checkpoint=whole.checkpoints[4], done=4)
    assert rest.losses == whole.losses[4:]
