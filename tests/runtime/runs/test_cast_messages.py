"""Messages and gradient sums in fewer bytes: plain PyTorch loops that round in the same places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypipe.data import Corpus, prepare
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import build_schedule, less_memory
from raypipe.runtime.executor.casts import MessageCast, message_cast_of
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import adamw_update, mean_loss, microbatch_losses, whole_gpt
from tests.runtime.runs.small_runs import drive, small_job


class Rounded(torch.autograd.Function):
    """The identity, rounded both ways; the gradient multiplied by ``scale`` while it is narrow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        ctx.how = dtype, scale
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (dtype, scale) = grads, ctx.how
        return (g * scale).to(dtype).to(g.dtype) / scale, None, None


class Cut(nn.Module):
    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.how = dtype, scale

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, *self.how)


def plain(job: JobSpec, data: Path, dtype: torch.dtype, scale: float) -> tuple[list[float], float]:
    """Losses and the last validation loss of one process that rounds what would travel between two devices."""
    made = make_plan(job)
    placement = build_schedule(made, job.train.batch).placement
    ends = [part[-1] for s, part in enumerate(made.cut[:-1]) if any(row[s] != row[s + 1] for row in placement)]
    layers = enumerate(whole_gpt(job))
    model = nn.Sequential(*(nn.Sequential(layer, Cut(dtype, scale)) if i in ends else layer for i, layer in layers))
    return microbatch_losses(job, data, model, adamw_update(job, model))


PLANS = [
    ({"schedule": "1f1b", "stages": 2, "replicas": 2, "transport": "gloo"}, "float16", 1),
    ({"schedule": "gpipe", "stages": 2, "transport": "ray-collective", "recompute": "full"}, "float32", 1),
    ({"schedule": "zb-v", "stages": 2}, "bfloat16", 2),  # of three cuts, one is inside a device
    *exhaustive(
        ({"schedule": "1f1b", "stages": 4}, "bfloat16", 3),
        ({"schedule": "chimera", "stages": 2}, "bfloat16", 1),
        ({"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2}, "bfloat16", 3),
    ),
]


@pytest.mark.runs
@pytest.mark.parametrize(("parallel", "wire", "cuts"), PLANS, ids=lambda p: p["schedule"] if isinstance(p, dict) else p)
def test_losses_are_those_of_a_loop_that_rounds_at_the_cuts(
    parallel, wire, cuts, stage_pool, text_folder, tmp_path
) -> None:
    job = small_job(text_folder, {**parallel, "wire_dtype": wire}, clip=0.5)
    done = drive(job, stage_pool, tmp_path)
    dtype = getattr(torch, wire)
    targets = job.train.batch * 16
    losses, validation = plain(job, tmp_path / "data", dtype, targets if wire == "float16" else 1.0)  # 128, 2 to the 7
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)
    assert done.val_losses == [pytest.approx(validation, abs=1e-9, rel=0)]
    # And every message is as small as it should be: hidden 16, sequence 16, there and back.
    count = job.train.batch // job.parallel.microbatch * cuts * 2
    assert done.driver.counts["p2p"] == count
    assert done.driver.counts["p2p_bytes"] == count * job.parallel.microbatch * 16 * 16 * dtype.itemsize


@pytest.mark.runs
def test_rounding_is_what_makes_the_difference(stage_pool, text_folder, tmp_path) -> None:
    curves = []
    for wire in (None, "float32", "bfloat16"):
        job = small_job(text_folder, {"schedule": "1f1b", "stages": 2, "wire_dtype": wire}, clip=0.5)
        curves.append(drive(job, stage_pool, tmp_path / str(wire)).losses)
    exact, single, half = curves
    off = [max(abs(a - b) for a, b in zip(exact, other, strict=True)) for other in (single, half)]
    assert 0 < off[0] < 1e-5 < off[1]


def test_only_wider_floating_tensors_are_cast() -> None:
    message_cast = MessageCast(torch.float16, 128.0)
    given = [torch.randn(3, dtype=torch.float64), torch.randn(3).bfloat16(), torch.arange(3), torch.ones(3).bool()]
    specs = [TensorSpec(tuple(t.shape), t.dtype) for t in given]
    sent = message_cast.pack("act", given)
    assert [t.dtype for t in sent] == [torch.float16, torch.bfloat16, torch.int64, torch.bool]
    assert [TensorSpec(tuple(t.shape), t.dtype) for t in sent] == [message_cast.spec(spec) for spec in specs]
    back = message_cast.unpack("act", sent, specs)
    assert [t.dtype for t in back] == [t.dtype for t in given]
    assert torch.equal(back[0], given[0].half().double())
    assert all(a is b for a, b in zip(back[1:], given[1:], strict=True))


def test_gradients_of_a_mean_do_not_vanish_in_float16(text_folder) -> None:
    """The mean over 4096 targets: 1e-6 a target is 2e-10 of the loss, nothing in float16."""
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2, "wire_dtype": "float16"}, batch=256)
    message_cast = message_cast_of(job, job.parallel)
    gradient = torch.full((4,), 1e-6 / 4096, dtype=torch.float64)
    spec = TensorSpec((4,), torch.float64)
    assert not gradient.half().any()
    (back,) = message_cast.unpack("grad", message_cast.pack("grad", [gradient]), [spec])
    assert torch.allclose(back, gradient, rtol=0.05)
    # A power of two: what has enough digits comes through as it went.
    exact = torch.tensor([0.75, -3.0], dtype=torch.float64) / 4096
    assert torch.equal(message_cast.unpack("grad", message_cast.pack("grad", [exact]), [spec])[0], exact)


@pytest.mark.parametrize(
    ("dtype", "wire", "words"),
    [
        ("float32", "float32", "(?s)not narrower than the float32.*use bfloat16 or float16"),
        ("float32", "bf16", 'the text "bf16"'),
    ],
)
def test_a_wire_dtype_that_narrows_nothing_is_refused(dtype, wire, words, text_folder) -> None:
    with pytest.raises(SpecError, match=words):
        small_job(text_folder, {"schedule": "1f1b", "stages": 2, "wire_dtype": wire}, dtype=dtype)


# Gradients summed in another dtype: a plain PyTorch loop that rounds as two members do, float64, 1e-9.

STEPS = 4
SUM_PLANS = [
    {"sync": "reverse-first-k", "first_k": 2},
    {"shard": "zero2"},
    {"stages": 2, "shard": "zero3"},
    *exhaustive({}, {"stages": 2}, {"sync": "prioritised"}, {"shard": "zero1"}, {"shard": "zero3"}),
]


def two_copies(text: Path, parallel: dict[str, Any], **train: Any) -> JobSpec:
    """Untied: a matrix of two stages would be summed over four devices."""
    return small_job(text, {"replicas": 2, **parallel}, model={"tie_embeddings": False}, steps=STEPS, **train)


def summed_in(job: JobSpec, data: Path, dtype: torch.dtype | None) -> list[float]:
    """Two halves of each mini-batch; their gradients are rounded, added in ``dtype``, and brought back."""
    model = whole_gpt(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.train.lr, weight_decay=job.train.weight_decay)
    corpus = Corpus.open(data)
    losses = []
    half = job.train.batch // 2
    for step in range(STEPS):
        total, result = 0.0, []
        for rows in (range(half), range(half, 2 * half)):
            loss = mean_loss(job, model, corpus, step, rows) / 2
            result.append(torch.autograd.grad(loss, list(model.parameters())))
            total += loss.item()
        for p, one, two in zip(model.parameters(), *result, strict=True):
            p.grad = one + two if dtype is None else (one.to(dtype) + two.to(dtype)).to(p.dtype)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.fixture(scope="module")
def data(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = two_copies(text_folder, {})
    folder = tmp_path_factory.mktemp("plain")
    prepare(job.data, job.model.sequence, folder)
    return folder


@pytest.mark.runs
@pytest.mark.parametrize("parallel", SUM_PLANS, ids=lambda p: "-".join(str(v) for v in p.values()) or "lazy")
def test_losses_of_a_loop_that_rounds(parallel, data, stage_pool, text_folder, tmp_path) -> None:
    job = two_copies(text_folder, {**parallel, "reduce_dtype": "bfloat16"})
    expected = summed_in(job, data, torch.bfloat16)
    assert drive(job, stage_pool, tmp_path).losses == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] != pytest.approx(summed_in(job, data, None)[-1], abs=1e-9, rel=0)


@pytest.mark.runs
def test_groups_of_copies_sum_in_it_too(stage_pool, text_folder, tmp_path) -> None:
    """Four copies in pairs: rounded more often, by about as much."""
    wide = {"replicas": 4, "microbatch": 1}
    own = drive(two_copies(text_folder, wide), stage_pool, tmp_path / "own")
    shards = {"shard": "zero2", "shard_replicas": 2}
    cast = drive(two_copies(text_folder, {**wide, **shards, "reduce_dtype": "bfloat16"}), stage_pool, tmp_path / "cast")
    assert cast.losses == pytest.approx(own.losses, rel=5e-3)
    assert cast.losses[1:] != own.losses[1:]


@pytest.mark.runs
def test_wider_sums_of_narrow_gradients(stage_pool, text_folder, tmp_path) -> None:
    """A sum of two bfloat16 numbers, made in float32 and rounded once, is their bfloat16 sum: the losses are equal."""
    losses = [
        drive(two_copies(text_folder, keys, dtype="bfloat16-true"), stage_pool, tmp_path / str(n)).losses
        for n, keys in enumerate(({}, {"reduce_dtype": "float32"}))
    ]
    assert losses[0] == losses[1]


def test_it_stays_when_a_plan_changes(text_folder) -> None:
    job = two_copies(text_folder, {"reduce_dtype": "bfloat16"})
    result = less_memory(job, make_plan(job))
    assert result is not None
    assert result[0].parallel.reduce_dtype == "bfloat16"
