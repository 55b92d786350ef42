"""Numbers: bfloat16 autocast, learning rates, and transports that change no bit."""

from __future__ import annotations

from math import cos, pi

import pytest
import torch

from raypipe.checkpoint import open_checkpoint
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers
from raypipe.runtime.update.optimizer import learning_rate, make_optimizer
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import adamw_update, microbatch_losses, plain_losses, whole_gpt
from tests.runtime.runs.small_runs import drive, small_job
from tests.runtime.transport.kinds import BETWEEN_CPUS

TWO = {"schedule": "1f1b", "stages": 2}


@pytest.mark.runs
def test_bfloat16_autocast_is_that_of_one_process(stage_pool, text_folder, tmp_path) -> None:
    settings = {"steps": 5, "clip": 0.5}
    job = small_job(text_folder, TWO | {"wire_dtype": "float32"}, dtype="bfloat16", **settings)
    done = drive(job, stage_pool, tmp_path / "bfloat16")
    model = whole_gpt(job, torch.float32)
    plain, _ = microbatch_losses(job, tmp_path / "bfloat16" / "data", model, adamw_update(job, model), autocast=True)
    # The products are those of the same bfloat16 numbers, so the first losses are equal; after an update the order of
    # sums may turn a rounding to 8 bits the other way (2e-5 a step was seen; such a bit is 0.4 % of a value).
    assert done.losses[0] == pytest.approx(plain[0], abs=1e-6, rel=0)
    assert done.losses == pytest.approx(plain, abs=5e-4, rel=0)
    cast = drive(small_job(text_folder, TWO, dtype="bfloat16", **settings), stage_pool, tmp_path / "cast")
    assert cast.losses != done.losses  # messages are cast unless the job says otherwise: a rounding at the cut
    assert cast.losses == pytest.approx(done.losses, abs=2e-3, rel=0)
    single = drive(small_job(text_folder, TWO, dtype="float32", **settings), stage_pool, tmp_path / "float32")
    # It really is another arithmetic.
    assert max(abs(a - b) for a, b in zip(done.losses, single.losses, strict=True)) > 1e-6


# Learning rates, each against its closed form written out here.

PEAK, LEAST, WARM, STEPS = 0.4, 0.1, 4, 20


def closed_form(kind: str, step: int) -> float:
    if step < WARM:
        return PEAK * (step + 1) / WARM
    share = {
        "constant": 1.0,
        "linear": 1 - (step - WARM) / (STEPS - WARM),
        "cosine": (1 + cos(pi * (step - WARM) / (STEPS - WARM))) / 2,
    }[kind]
    return PEAK if kind == "constant" else LEAST + (PEAK - LEAST) * share


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_learning_rate_follows_its_closed_form(kind) -> None:
    spec = TrainSpec(steps=STEPS, batch=1, lr=PEAK, min_lr=LEAST, warmup_steps=WARM, lr_schedule=kind)
    rates = [learning_rate(spec, step) for step in range(STEPS)]
    assert rates == pytest.approx([closed_form(kind, step) for step in range(STEPS)], rel=1e-12)
    assert rates[WARM - 1] == max(rates) == PEAK  # the warm-up ends at the peak
    if kind != "constant":
        assert rates[WARM:] == sorted(rates[WARM:], reverse=True)
        assert learning_rate(spec, STEPS) == pytest.approx(LEAST)  # it would reach the floor with the step after
    assert learning_rate(TrainSpec(steps=5, batch=1, lr=PEAK), 0) == PEAK  # no warm-up unless asked for


def test_cosine_is_pytorchs() -> None:
    spec = TrainSpec(steps=STEPS, batch=1, lr=PEAK, min_lr=LEAST, lr_schedule="cosine")
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=PEAK)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=LEAST)
    for step in range(STEPS):
        assert learning_rate(spec, step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


@pytest.mark.runs
def test_the_optimizer_uses_the_steps_learning_rate(stage_pool, text_folder, tmp_path) -> None:
    """Plain SGD moves by ``lr`` times the gradient, so two first steps compare as their rates do."""
    moved = []
    for name, settings in {"peak": {}, "warm": {"warmup_steps": 4}}.items():
        job = small_job(text_folder, TWO, optimizer="sgd", weight_decay=0.0, lr=PEAK, steps=1, **settings)
        done = drive(job, stage_pool, tmp_path / name)
        assert [row["lr"] for row in done.rows] == [learning_rate(job.train, 0)]
        key = "param/1.qkv.weight"
        start = GptLayers(job.model, torch.float64).build(1, job.train.seed).qkv.weight
        moved.append(open_checkpoint(done.checkpoints[1]).read([key])[key] - start.detach())
    assert float(moved[0].abs().max()) > 0
    assert torch.allclose(moved[0], 4 * moved[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_optimizers_are_pytorchs_with_the_jobs_settings(name, kind) -> None:
    spec = TrainSpec(
        steps=1, batch=1, optimizer=name, lr=0.5, betas=(0.8, 0.9), eps=1e-6, momentum=0.7, weight_decay=0.3
    )
    made = make_optimizer(spec, {"p": torch.nn.Parameter(torch.ones(2))})
    assert type(made).__bases__ == (kind,)  # without what would import the tracer
    wanted = {"lr": 0.5, "weight_decay": 0.3}
    wanted |= {"momentum": 0.7} if name == "sgd" else {"betas": (0.8, 0.9), "eps": 1e-6}
    assert wanted.items() <= made.defaults.items()


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel",
    [TWO, {"stages": 1, "microbatch": 4, "tensor": 2}, *exhaustive({"schedule": "chimera", "stages": 2})],
    ids=["tied-over-stages", "divided", "two-replicas"],
)
def test_norms_and_biases_do_not_decay_under_any_plan(parallel, stage_pool, text_folder, tmp_path) -> None:
    job = small_job(text_folder, parallel, dtype="float64", decay="matrices", weight_decay=0.5, steps=4)
    done = drive(job, stage_pool, tmp_path / "run")
    plain = plain_losses(job, tmp_path / "run" / "data", 4)
    assert done.losses == pytest.approx(plain, abs=1e-9, rel=0)
    every = plain_losses(
        small_job(text_folder, parallel, dtype="float64", weight_decay=0.5, steps=4), tmp_path / "run" / "data", 4
    )
    assert done.losses != pytest.approx(every, abs=1e-7, rel=0)


@pytest.mark.runs
def test_every_transport_gives_the_same_bits(stage_pool, text_folder, tmp_path) -> None:
    curves = {}
    for transport in BETWEEN_CPUS:
        job = small_job(text_folder, TWO | {"transport": transport}, dtype="float32", clip=0.5, steps=5)
        curves[transport] = drive(job, stage_pool, tmp_path / transport).losses
    assert {name: losses for name, losses in curves.items() if losses != curves["shm"]} == {}
