"""Autocast's narrow copies of the weights: one set a step, and not a bit of any result changes.

The reference is autocast as PyTorch describes it, a block of its own around every forward.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from raypipe.job import GptSpec
from raypipe.models import GptLayers, LayeredModel, build_model
from raypipe.runtime.backward.deferred import WeightQueue
from raypipe.runtime.executor.casts import Casts
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.asynchronous import WHOLE, parts
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import add_recompute, add_updates
from tests.cost.test_memory_of_a_step import executor
from tests.job_files import minimal_job
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import CASES, MICROBATCH, fields_of

HERE = "tests.runtime.executor.test_casts"
GPT = GptSpec(layers=2, hidden=32, heads=2, sequence=16, vocabulary=64, dropout=0.1)
MATRICES = 2 * 4 + 1
"""Of that GPT: four a block, and the tied one; the look-ups cast nothing."""


@pytest.fixture
def a_block_a_forward(monkeypatch: pytest.MonkeyPatch):
    """Call it for plain autocast from then on."""

    def patch() -> None:
        monkeypatch.setattr(Casts, "step", lambda self: nullcontext())
        monkeypatch.setattr(Casts, "forward", lambda self: torch.autocast(self.device, self.dtype))
        monkeypatch.setattr(WeightQueue, "cast", lambda self, parameter: parameter)

    return patch


class Checkpointed(nn.Module):
    """Cannot be captured; recomputes by itself, first without gradients and then with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        sign = 1.0 if x.mean() > 0 else -1.0
        return sign * torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


def checkpointed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), Checkpointed(), nn.Linear(8, 3))


MODELS = {name: CASES[name] for name in ("gpt2", "cnn", "half frozen")}
MODELS["checkpointed"] = ({"import": f"{HERE}:checkpointed"}, CASES["mlp"][1])
_models: dict[str, LayeredModel] = {}


def model_of(case: str) -> LayeredModel:
    if case not in _models:
        spec, rows = MODELS[case]
        job = minimal_job(spec, "unused.npz", batch=6, dtype="bfloat16")
        _models[case] = build_model(job, fields_of(rows))
    return _models[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"split": True}], ids=["joint", "recompute", "split"])
def test_gradients_are_those_of_a_block_a_forward(case, how, a_block_a_forward) -> None:
    pytest.importorskip("transformers")
    model = model_of(case)
    rows = model.task.complete(MODELS[case][1])
    cut = even_cut(model, min(3, model.count))

    def run():
        return run_step(model, cut, rows, torch.float32, MICROBATCH, autocast=torch.bfloat16, **how)

    result = run()
    a_block_a_forward()
    plain = run()
    assert result.loss == plain.loss
    for name, gradient in plain.gradients.items():
        assert torch.equal(result.gradients[name], gradient), name
    assert any(bool(gradient.any()) for gradient in plain.gradients.values())


STEPS = [
    ("gpipe", None), ("1f1b", "late"), ("zb-h1", None), ("bfs", None), ("pipedream", None), ("pipedream-2bw", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "recompute"), STEPS)
def test_copies_never_outlive_the_weights(name, recompute, a_block_a_forward) -> None:
    """Three steps of AdamW: with a copy from before an update, the second would be another."""
    chunks = 2 if name == "bfs" else 1
    schedule = generate(name, Shape(devices=1, microbatches=4, chunks=chunks))
    if recompute is not None:
        schedule = add_recompute(schedule, recompute)
    spec = GPT.model_copy(update={"tie_embeddings": name != "pipedream"})
    cut = [range(2), range(2, 4)] if chunks == 2 else [range(4)]
    (program,) = programs(parts(add_updates(schedule) if schedule.versions == "flush" else schedule)[WHOLE])

    def losses() -> list[float]:
        torch.manual_seed(1)
        runner = executor(spec, schedule, cut, 2, "bfloat16")
        return [runner.run(program, step, 0.05).loss_sum for step in range(3)]

    result = losses()
    a_block_a_forward()
    assert result == losses()
    assert len(set(result)) == 3


def test_copies_go_with_the_weights_without_autocast_too() -> None:
    """A router in float32 of a float64 model; fused optimizers change parameters without a new version."""
    queue, weight = WeightQueue(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    stage = GptLayers(GPT).build_stage([0], seed=0)
    stage.queue = queue
    narrow = queue.copy_in(weight, torch.float32)
    weight.data.fill_(2.0)
    assert queue.copy_in(weight, torch.float32) is narrow
    Casts(torch.device("cpu"), None, [stage]).drop()
    assert queue.copy_in(weight, torch.float32).tolist() == [2.0, 2.0]


def copies(split: bool, recompute: bool = False) -> int:
    """Narrow copies of matrices that the graphs of a step save, each counted once."""
    model = GptLayers(GPT)
    ids = torch.randint(64, (8, 17))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    shapes = {(96, 32), (32, 32), (128, 32), (32, 128), (64, 32)}
    saved: list[Tensor] = []

    def look(x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and {tuple(x.shape), tuple(x.t().shape) if x.dim() == 2 else ()} & shapes:
            saved.append(x)  # and hold it, so that no other one takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(look, lambda x: x):
        run_step(
            model, even_cut(model, 2), rows, torch.float32, 1, autocast=torch.bfloat16, split=split, recompute=recompute
        )
    return len({x.untyped_storage().data_ptr() for x in saved})


@pytest.mark.parametrize(("split", "recompute"), [(False, False), (False, True), (True, False)])
def test_all_micro_batches_save_one_copy_of_each_matrix(split, recompute, a_block_a_forward) -> None:
    assert copies(split, recompute) == MATRICES
    a_block_a_forward()
    assert copies(split, recompute) == (0 if split else 8 * MATRICES)  # split: cast again in every backward


def test_what_arrived_is_not_kept_with_them() -> None:
    """Autocast keeps copies of any leaf; an activation's would live as long as the weights'."""
    stage = nn.Module()
    stage.queue = WeightQueue()
    casts = Casts(torch.device("cpu"), torch.bfloat16, [stage])
    weight = torch.randn(4, 4, requires_grad=True)
    with casts.step():
        arrived = torch.randn(2, 4).requires_grad_()
        (entering,) = casts.entering((arrived,))
        seen: list[Tensor] = []
        with casts.forward(), torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x), x)[1], lambda x: x):
            y = torch.nn.functional.linear(entering, weight)
            recomputed = torch.nn.functional.linear(entering, weight)
        activations = {x.data_ptr() for x in seen if x.shape == (2, 4)}
        assert len(activations) == 2  # each its own
        assert len({x.data_ptr() for x in seen if x.shape == (4, 4)}) == 1
        (y.sum() + recomputed.sum()).backward()
        assert arrived.grad is not None
