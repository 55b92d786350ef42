"""Numbers: bfloat16 autocast, learning rates, and transports that change no bit."""

from __future__ import annotations

from math import cos, pi
from pathlib import Path

import pytest
import torch
from torch import nn

from raypipe.checkpoint import open_checkpoint
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers
from raypipe.runtime.update.optimizer import OptimizerSnapshot, learning_rate, make_optimizer, updated_tensor
from tests.capture.models import FAMILIES
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import adamw_update, microbatch_losses, plain_losses, whole_gpt
from tests.runtime.runs.small_runs import drive, job_for, small_job
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


# bfloat16 parameters with float32 master weights: a plain PyTorch loop that does the same has the same losses.


ONE = {"schedule": "gpipe", "stages": 1}


def plain(job: JobSpec, data: Path) -> tuple[list[float], float]:
    """Losses and the last validation loss: a bfloat16 model, and AdamW over float32 copies of its parameters."""
    model = whole_gpt(job, torch.bfloat16)
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=job.train.lr, weight_decay=job.train.weight_decay, fused=True)

    def update() -> None:
        if job.train.clip is not None:
            norm = torch.stack([p.grad.float().norm() for p in parameters]).double().square().sum().sqrt().item()
            for p in parameters:
                p.grad.mul_(min(1.0, job.train.clip / (norm + 1e-6)))
        for p, master in zip(parameters, masters, strict=True):
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                p.copy_(master)

    return microbatch_losses(job, data, model, update)


def job_of(text_folder: Path, parallel: dict, model: dict | None = None, **train) -> JobSpec:
    return small_job(text_folder, parallel, model, dtype="bfloat16-true", **train)


# The kernels are the same, in the same order, so that nothing may differ: of one stage, or without a parameter in two.
EXACT = [(ONE, {"optimizer": "adamw", "clip": 0.5}), *exhaustive((TWO | {"stages": 4}, {}), (ONE, {}), (TWO, {}))]


@pytest.mark.runs
@pytest.mark.parametrize(("parallel", "train"), EXACT, ids=str)
def test_losses_are_those_of_a_plain_loop(parallel, train, stage_pool, text_folder, tmp_path) -> None:
    job = job_of(text_folder, parallel, {"tie_embeddings": parallel is ONE}, **train)
    done = drive(job, stage_pool, tmp_path)
    losses, validation = plain(job, tmp_path / "data")
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)
    assert done.val_losses == [pytest.approx(validation, abs=1e-6, rel=0)]


# Here gradients are summed in another order (over copies, over the stages of a tied parameter, in W), each sum rounded
# to 8 bits. A first step is the plain loop's all the same, and later losses come within such roundings of it.
OTHERS = [
    {"schedule": "zb-v", "stages": 2},
    {"schedule": "1f1b", "stages": 2, "update": "optimistic"},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard": "zero3"},
    {"schedule": "1f1b", "stages": 1, "tensor": 2},
    *exhaustive(
        TWO,
        {"schedule": "zb-h1", "stages": 2},
        {"schedule": "chimera", "stages": 2},
        {"schedule": "1f1b", "stages": 1, "replicas": 2},
        {"schedule": "1f1b", "stages": 1, "replicas": 2, "shard": "zero1"},
    ),
]


@pytest.mark.runs
@pytest.mark.parametrize("parallel", OTHERS, ids=lambda p: "-".join(map(str, p.values())))
def test_every_kind_of_plan_trains_with_master_weights(parallel, stage_pool, text_folder, tmp_path) -> None:
    job = job_of(text_folder, parallel, clip=0.5)
    done = drive(job, stage_pool, tmp_path)
    losses, validation = plain(job, tmp_path / "data")
    assert done.losses[0] == pytest.approx(losses[0], abs=1e-6 if "tensor" not in parallel else 5e-3, rel=0)
    assert done.losses == pytest.approx(losses, abs=5e-3, rel=0)
    assert done.val_losses == [pytest.approx(validation, abs=5e-3, rel=0)]


@pytest.mark.runs
@pytest.mark.parametrize("schedule", ["pipedream", *exhaustive("pipedream-2bw")])
def test_weight_versions_are_of_the_rounded_weights(schedule, stage_pool, text_folder, tmp_path) -> None:
    parallel = {"schedule": schedule, "stages": 2}
    job = job_of(text_folder, parallel, {"tie_embeddings": False})
    done = drive(job, stage_pool, tmp_path / "narrow")
    wide = drive(small_job(text_folder, parallel, {"tie_embeddings": False}, dtype="float32"), stage_pool, tmp_path)
    assert done.losses == pytest.approx(wide.losses, abs=0.03, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel", [*exhaustive(TWO), {"schedule": "1f1b", "stages": 1, "replicas": 2, "shard": "zero3"}], ids=str
)
def test_a_checkpoint_has_the_master_weights_and_goes_on_from_them(parallel, stage_pool, text_folder, tmp_path) -> None:
    settings = {"steps": 6, "checkpoint_every": 3, "clip": 0.5, "keep_checkpoints": 4}
    job = job_of(text_folder, parallel, **settings)
    whole = drive(job, stage_pool, tmp_path / "whole")
    checkpoint = open_checkpoint(whole.checkpoints[3])
    saved = checkpoint.read([key for key in checkpoint.keys if key.startswith(("param/", "optim/"))])
    assert {value.dtype for value in saved.values()} == {torch.float32}
    # They are finer than the parameters.
    assert any((t != t.bfloat16().float()).any() for key, t in saved.items() if key.startswith("param/"))
    rest = drive(job, stage_pool, tmp_path / "rest", whole.checkpoints[3], 3)
    assert rest.losses == whole.losses[3:]  # bit for bit


@pytest.mark.runs
@pytest.mark.parametrize("family", [*exhaustive("gpt2"), "llama"])
def test_captured_models_train_in_bfloat16(family, stage_pool, text_folder, tmp_path) -> None:
    pytest.importorskip("transformers")
    model = {"hf": family, "config": {**FAMILIES[family], "vocab_size": 257}, "sequence": 16}
    curves = []
    for dtype in ("bfloat16-true", "float32"):
        job = job_for(model, text_folder, {"schedule": "zb-h1", "stages": 2}, clip=0.5, dtype=dtype)
        done = drive(job, stage_pool, tmp_path / dtype)
        curves.append(done.losses)
        sent = done.driver.counts["p2p_bytes"] // done.driver.counts["p2p"]
        assert sent == 2 * 16 * model["config"].get("n_embd", model["config"].get("hidden_size")) * (
            2 if dtype == "bfloat16-true" else 4
        )
    narrow, wide = curves
    assert narrow == pytest.approx(wide, abs=0.02, rel=0)
    assert max(abs(a - b) for a, b in zip(narrow, wide, strict=True)) > 1e-5  # it really is another arithmetic


def test_messages_are_as_narrow_as_they_can_be(text_folder) -> None:
    with pytest.raises(SpecError, match="bfloat16 is not narrower than the bfloat16 that stages exchange"):
        job_of(text_folder, TWO | {"wire_dtype": "bfloat16"})


@pytest.mark.parametrize("gradient", [0.5, None])
def test_an_update_smaller_than_the_last_bit_is_not_lost_and_can_be_undone(gradient) -> None:
    train = TrainSpec(steps=1, batch=1, optimizer="sgd", lr=2**-12, weight_decay=0.0, dtype="bfloat16-true")
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = make_optimizer(train, {"p": p})
    for step in range(1, 17):
        p.grad = None if gradient is None else torch.full_like(p, gradient)
        kept = OptimizerSnapshot(optimizer)
        optimizer.step()
        kept.restore()
        optimizer.step()
        exact = 1 - step * (gradient or 0.0) * 2**-12  # representable in float32
        assert (updated_tensor(optimizer, p) == exact).all()
        assert (p == torch.tensor(exact).bfloat16()).all()
