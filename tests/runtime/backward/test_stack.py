"""Forward doubling: two micro-batches whose forward is made again anyway run as one, with the same results."""

from __future__ import annotations

import pytest
import torch

from raypipe.job import GptSpec
from raypipe.models import CutTensor, GptLayers
from raypipe.runtime.stage.stage import StageModule, can_stack, stacked, stacked_inputs, unstacked
from tests.runtime.runs.one_device import Outcome, even_cut, run_step
from tests.runtime.runs.test_any_model import CASES, MICROBATCH, model_of


def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every stage's forwards from now on, but for those of a recompute, which autograd follows."""
    seen: list[int] = []
    plain = StageModule.forward

    def counting(self, arrived, inputs):
        if not torch.is_grad_enabled():
            seen.append(len((*arrived, *inputs.values())[0]))
        return plain(self, arrived, inputs)

    monkeypatch.setattr(StageModule, "forward", counting)
    return seen


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.loss == pytest.approx(other.loss, abs=1e-12, rel=0)
    assert one.gradients.keys() == other.gradients.keys()
    for name, gradient in one.gradients.items():
        assert torch.allclose(gradient, other.gradients[name], rtol=0, atol=1e-12), name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "t5", "cnn", "regression"])
def test_a_pair_is_two_forwards(case, monkeypatch) -> None:
    """Dropout, several tensors at a cut, raw inputs, an odd micro-batch at the end."""
    model = model_of(case)
    rows = model.task.complete(CASES[case][1])
    cut = even_cut(model, 2)
    alone = run_step(model, cut, rows, torch.float64, MICROBATCH, recompute=True)
    seen = rows_seen(monkeypatch)
    paired = run_step(model, cut, rows, torch.float64, MICROBATCH, recompute=True, pairs=True)
    assert_same(paired, alone)
    assert seen == [4, 4, 2, 2]


@pytest.mark.parametrize("tied", [True, False])
def test_a_pair_of_the_built_in_model(tied, monkeypatch) -> None:
    spec = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=32, dropout=0.2, tie_embeddings=tied)
    model = GptLayers(spec, torch.float64)
    ids = torch.randint(32, (4, 9))
    rows = {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}
    alone = run_step(model, even_cut(model, 2), rows, torch.float64, 1, recompute=True)
    seen = rows_seen(monkeypatch)
    assert_same(run_step(model, even_cut(model, 2), rows, torch.float64, 1, recompute=True, pairs=True), alone)
    assert seen == [2, 2, 2, 2]
    # Without a recompute, each micro-batch needs activations of its own.
    kept = run_step(model, even_cut(model, 2), rows, torch.float64, 1, pairs=True)
    assert_same(kept, alone)
    assert seen == [2, 2, 2, 2]


def test_only_rows_of_samples_can_stand_behind_one_another() -> None:
    def tensors(*shapes: tuple[int, ...]) -> list[CutTensor]:
        return [CutTensor(shape, torch.float32, True) for shape in shapes]

    assert can_stack(tensors((1, 8), (5, 3)), tensors((2, 8), (10, 3)))  # 5 tokens of one sample, 10 of two
    assert can_stack([], [])
    assert not can_stack(tensors((1, 8), (1, 8)), tensors((2, 8), (1, 8)))  # a mask that all samples share
    assert not can_stack(tensors((8, 1)), tensors((8, 2)))
    assert not can_stack(tensors(()), tensors(()))


def test_rows_come_back_as_they_went_in() -> None:
    payloads = [(torch.randn(2, 3), torch.randn(4)) for _ in range(3)]
    for before, after in zip(payloads, unstacked(stacked(payloads), 3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    inputs = [{"ids": torch.tensor([k])} for k in range(2)]
    assert stacked_inputs(inputs)["ids"].tolist() == [0, 1]
    assert stacked(payloads[:1]) is payloads[0]
    assert stacked_inputs(inputs[:1]) is inputs[0]
