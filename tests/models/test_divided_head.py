"""A head divided by rows: loss and gradients of the whole one, and no more of the logits than its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raypipe.errors import SpecError
from raypipe.job.spec import job_from
from raypipe.models import LayeredModel, build_model
from raypipe.models.divided_head import AllShares, DividedHead, ShareLogits
from raypipe.models.losses import OwnLoss
from raypipe.models.task import IGNORED, cross_entropy
from raypipe.runtime.backward.chunked_loss import ChunkedHead
from raypipe.runtime.backward.deferred import Closure, WeightQueue
from raypipe.schedule.families.vocabulary import graph_of
from tests.exhaustive import exhaustive
from tests.job_files import minimal_job
from tests.runtime.backward.test_chunked_loss import Largest
from tests.runtime.runs.one_device import LR, even_cut, one_device, run_step

TOKENS, WIDTH, VOCABULARY = 23, 6, 41


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_plain_pytorch(smoothing: float, bound: bool, waits: bool) -> None:
    """Of uneven shares with a bias, in chunks, where some labels are ignored."""
    torch.manual_seed(0)

    def scaled(logits: Any) -> Any:
        return 3 * torch.tanh(logits / 3) if bound else logits

    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[::4] = IGNORED
    whole = F.cross_entropy(scaled(F.linear(x, weight, bias)), labels, reduction="sum", label_smoothing=smoothing)
    wanted = torch.autograd.grad(whole / 7, (x, weight, bias))
    queue, said, shares, first = WeightQueue(), [], [], 0
    for rows in (14, 14, 13):
        own = [p.detach()[first : first + rows].clone().requires_grad_() for p in (weight, bias)]
        head = ChunkedHead(x, *own, 5, queue, waits)
        if bound:
            head = head.then(scaled)
        said.append(cross_entropy(ShareLogits(head, first, VOCABULARY), labels, None, smoothing))
        shares.append(own)
        first += rows
    loss = cross_entropy(AllShares(torch.stack(said)), labels, None, smoothing)
    closures: list[Closure] = []
    with queue.collect(closures):
        (loss / 7).backward()
    assert len(closures) == 3 * waits
    for closure in closures:
        closure.compute()
    made = (x.grad, *(torch.cat([own[n].grad for own in shares]) for n in range(2)))
    assert loss.item() == pytest.approx(whole.item(), abs=1e-12)
    for gradient, right in zip(made, wanted, strict=True):
        assert gradient is not None
        assert torch.allclose(gradient, right, rtol=0, atol=1e-12)


MODELS: dict[str, dict[str, Any]] = {
    "GPT": {"layers": 2, "hidden": 16, "heads": 2, "sequence": 12, "vocabulary": 301, "tie_embeddings": False},
    "tied GPT": {"layers": 2, "hidden": 16, "heads": 2, "sequence": 12, "vocabulary": 301, "tie_embeddings": True},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 301, "attn_pdrop": 0.0},
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32, "vocab_size": 301,
    },
    "granite": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 32, "vocab_size": 301, "logits_scaling": 4.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


def model_of(name: str, text: Path, vocabulary: str, chunk: int | None = None) -> LayeredModel:
    sizes = MODELS[name]
    job = {
        "name": "head", "model": sizes if "layers" in sizes else {"hf": name, "config": sizes, "sequence": 12},
        "data": {"type": "bytes", "path": str(text)},
        "train": {"steps": 1, "batch": 6, "dtype": "float64", "loss_chunk_tokens": chunk, "label_smoothing": 0.1},
        "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2, "vocabulary": vocabulary},
    }  # fmt: skip
    return build_model(job_from(job), None, 0)


ORDER = "device 0: " + " ".join(
    f"0F{m} 1F{m} 2F{m} 3F{m} 4F{m} 4B{m} 2B{m} 3B{m} 3W{m} 1BW{m} 0BW{m} 2W{m}" for m in range(3)
)


@pytest.mark.parametrize("name", ["GPT", "tied GPT", "gpt2", *exhaustive("llama", "granite")])
@pytest.mark.parametrize("chunk", [None, 5])
def test_a_step_is_that_of_the_whole_head(name: str, chunk: int | None, text_folder: Path) -> None:
    if "GPT" not in name:
        pytest.importorskip("transformers")
    whole, divided = model_of(name, text_folder, "whole"), model_of(name, text_folder, "split", chunk)
    assert isinstance(divided, DividedHead)
    tokens = torch.randint(256, (6, 13), generator=torch.Generator().manual_seed(2))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}
    body = even_cut(whole, 2)
    wanted = run_step(whole, body, rows, torch.float64, 2)
    text = f"schedule 1f1b\nfrozen 4\nedges {' '.join(f'{a}>{b}' for a, b in graph_of(2).edges)}\n{ORDER}"
    made = one_device(divided, [*body, *divided.own_stages], rows, torch.float64, 2, text=text, split=True)
    before = [{n: p.detach().clone() for n, p in stage.named.items()} for stage in made.stages]
    with Largest() as seen:
        loss = made.executor.run(made.program, 5, LR).loss_sum
    assert seen.values == 0, "nothing is as wide as the vocabulary"
    assert loss == pytest.approx(wanted.loss, abs=1e-9, rel=0)
    moved: dict[str, list[torch.Tensor]] = {}
    for stage, old in zip(made.stages, before, strict=True):
        for n, p in stage.named.items():
            moved.setdefault(n, []).append((old[n] - p.detach()) / LR)
    assert moved.keys() == wanted.gradients.keys()
    for n, gradient in wanted.gradients.items():
        copies = [m for m in moved[n] if m.shape == gradient.shape]  # of an embedding that the shares are tied to
        rows = [m for m in moved[n] if m.shape != gradient.shape]
        for one in [*copies, *([torch.cat(rows)] if rows else [])]:
            assert torch.allclose(one, gradient, rtol=0, atol=1e-9), n


def test_what_has_no_head_of_its_own_is_refused(text_folder: Path) -> None:
    model = model_of("GPT", text_folder, "whole")
    with pytest.raises(SpecError, match="rows do not give each of 200 devices one"):
        DividedHead(model, 200)
    model.task = OwnLoss(model.task, ("labels",))
    with pytest.raises(SpecError, match="this model has another loss"):
        DividedHead(model, 2)


def test_a_wish_of_the_planner_divides_nothing_yet(text_folder: Path) -> None:
    """What is measured for it is the whole model, from which the costs of shares follow."""
    job = minimal_job(MODELS["GPT"], text_folder, {"auto": True, "stages": 2, "vocabulary": "split"}, batch=6)
    assert not isinstance(build_model(job, None, 0), DividedHead)
