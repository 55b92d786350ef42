"""The loss of a linear head in chunks: loss and gradients of whole logits, which are never there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.errors import SpecError
from raypipe.job.spec import job_from
from raypipe.models import LayeredModel, build_model
from raypipe.models.losses import OwnLoss
from raypipe.models.task import IGNORED, NextToken, cross_entropy
from raypipe.runtime.backward.chunked_loss import ChunkedHead
from raypipe.runtime.backward.deferred import Closure, WeightQueue
from raypipe.runtime.executor.metrics import KeepsPredictions
from tests.exhaustive import exhaustive
from tests.runtime.runs.one_device import even_cut, run_step

TOKENS, WIDTH, VOCABULARY = 23, 6, 40


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_loss_and_gradients_are_those_of_plain_pytorch(waits: bool, chunk: int) -> None:
    """With a bias, a bound of the logits, smoothed labels and some that are ignored."""
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[::4] = IGNORED
    whole = F.cross_entropy(3 * torch.tanh(F.linear(x, weight, bias) / 3), labels, reduction="sum", label_smoothing=0.1)
    wanted = torch.autograd.grad(whole / 7, (x, weight, bias))
    queue = WeightQueue()
    head = ChunkedHead(x, weight, bias, chunk, queue, waits).then(lambda y: 3 * torch.tanh(y / 3))
    loss = cross_entropy(head, labels, None, 0.1)
    closures: list[Closure] = []
    with queue.collect(closures):
        (loss / 7).backward()
    assert len(closures) == waits
    assert not waits or (weight.grad is None and bias.grad is None)
    for closure in closures:
        closure.compute()
    assert loss.item() == pytest.approx(whole.item(), abs=1e-12)
    for p, gradient in zip((x, weight, bias), wanted, strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, gradient, rtol=0, atol=1e-12)


def test_a_frozen_head_and_a_frozen_body_get_no_gradient() -> None:
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    cross_entropy(ChunkedHead(x, weight, None, 4, WeightQueue(), False), labels).backward()
    assert weight.grad is not None
    x.requires_grad_()
    cross_entropy(ChunkedHead(x, weight.detach(), None, 4, WeightQueue(), True), labels).backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not cross_entropy(ChunkedHead(x, weight, None, 4, WeightQueue(), False), labels).requires_grad


def test_predictions_of_a_validation_are_whole_logits() -> None:
    x, weight = torch.randn(2, TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    keeps = KeepsPredictions(NextToken(), None)
    head = ChunkedHead(x, weight, None, 4, WeightQueue(), False).then(torch.tanh)
    keeps.add([0, 1], head, {"shift_labels": torch.zeros(2, TOKENS, dtype=torch.int64)})
    assert np.array_equal(keeps.kept[0].predictions, torch.tanh(F.linear(x, weight)).numpy())


MODELS: dict[str, dict[str, Any]] = {
    "tied GPT": {"layers": 2, "hidden": 16, "heads": 2, "sequence": 12, "vocabulary": 300, "tie_embeddings": True},
    "GPT": {"layers": 2, "hidden": 16, "heads": 2, "sequence": 12, "vocabulary": 300, "dropout": 0.1},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 300, "attn_pdrop": 0.0},
    "gemma2": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 32, "vocab_size": 300, "final_logit_softcapping": 3.0,
    },
    "granite": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 32, "vocab_size": 300, "logits_scaling": 4.0, "tie_word_embeddings": False,
    },
    "bert": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 300,
    },
}  # fmt: skip


def model_of(name: str, text: Path, chunk: int | None, smoothing: float = 0.0) -> LayeredModel:
    sizes = MODELS[name]
    model = sizes if "layers" in sizes else {"hf": name, "config": sizes, "sequence": 12}
    train = {
        "steps": 1,
        "batch": 6,
        "dtype": "float64",
        "loss_chunk_tokens": chunk,
        "label_smoothing": smoothing,
    }
    job = {
        "name": "chunks", "model": model, "data": {"type": "bytes", "path": str(text)}, "train": train,
        "parallel": {"schedule": "1f1b", "stages": 1, "microbatch": 2},
    }  # fmt: skip
    return build_model(job_from(job), None)


class Largest(TorchDispatchMode):
    """Notes the most values of a result whose last dimension is the vocabulary, but for the head's own gradient."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() and made.shape[-1] == 300:
            self.values = max(self.values, made.numel())
        return made


ORDERS: dict[str, dict[str, Any]] = {"joint": {}, "split": {"split": True}, "recomputed": {"recompute": True}}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["tied GPT", "GPT", "gpt2", "gemma2", *exhaustive("granite", "bert")])
def test_a_step_is_that_of_whole_logits(name: str, order: str, text_folder: Path) -> None:
    whole, chunked = (model_of(name, text_folder, chunk, 0.1) for chunk in (None, 5))
    tokens = torch.randint(256, (6, 13), generator=torch.Generator().manual_seed(2))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}
    rows["labels"] = rows["shift_labels"]
    cut = even_cut(whole, 2)
    wanted = run_step(whole, cut, rows, torch.float64, 2, **ORDERS[order])
    with Largest() as seen:
        made = run_step(chunked, cut, rows, torch.float64, 2, **ORDERS[order])
    assert seen.values <= 16 * 300  # the weight's own transpose; whole logits would be 24 rows
    assert made.loss == pytest.approx(wanted.loss, abs=1e-9, rel=0)
    assert made.gradients.keys() == wanted.gradients.keys()
    for key, gradient in wanted.gradients.items():
        assert torch.allclose(made.gradients[key], gradient, rtol=0, atol=1e-9), key


def test_a_model_that_computes_its_own_loss_is_refused(text_folder: Path) -> None:
    model = model_of("GPT", text_folder, None)
    model.task = OwnLoss(model.task, ("labels",))
    with pytest.raises(SpecError, match=r"train\.loss_chunk_tokens: is for models that end in a linear head"):
        model.in_chunks(5)
