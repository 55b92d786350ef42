"""Captured language models in slices: losses and gradients of whole sequences; what is no causal model is refused."""

from __future__ import annotations

import pytest
import torch

from raypipe.errors import RaypipeError
from raypipe.models import build_model, random_keys
from raypipe.models.current_slice import SliceRun, slice_run
from tests.job_files import minimal_job

TINY = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 300, "attn_pdrop": 0.0},
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 32, "vocab_size": 300,
    },
    "bert": {
        "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 300,
    },
    "mamba": {"num_hidden_layers": 1, "hidden_size": 16, "state_size": 4, "vocab_size": 300},
}  # fmt: skip


def model_of(name: str, folder, **config: object):
    model = {"hf": name, "config": {**TINY[name], **config}, "sequence": 12}
    plan = {"schedule": "1f1b", "stages": 1, "microbatch": 2}
    return build_model(minimal_job(model, folder, plan, dtype="float64"), None)


def step(model, slices: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one micro-batch in two stages, its slices forward and then back in reverse."""
    model.slices = slices
    middle = model.count // 2
    stages = [model.build_stage(range(middle), 1), model.build_stage(range(middle, model.count), 1)]
    tokens = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(2))
    whole = {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}
    assert slices == 1 or model.slice_lengths(slices)
    pieces: list[list] = [[], []]
    kept = []
    for i in range(slices):
        inputs = model.task.slice_inputs(whole, (i,), slices)
        x: tuple[torch.Tensor, ...] = ()
        with random_keys(5, 0, [0, 1], True):
            for stage, own in zip(stages, pieces, strict=True):
                with slice_run(SliceRun(i, slices, own) if slices > 1 else None):
                    x = stage(x, inputs)
        kept.append(model.task.loss(x[0], inputs))
    for loss in reversed(kept):
        loss.backward()
    return sum(loss.item() for loss in kept), {n: p.grad for s in stages for n, p in s.named().items()}


@pytest.mark.parametrize(
    ("name", "slices", "drops"), [("gpt2", 2, 0.0), ("gpt2", 4, 0.0), ("gpt2", 3, 0.2), ("llama", 3, 0.0)]
)
def test_slices_give_the_gradients_of_the_whole(name, slices, drops, text_folder) -> None:
    model = model_of(name, text_folder, **({"attn_pdrop": drops} if drops else {}))
    loss, gradients = step(model, 1)
    sliced, theirs = step(model, slices)
    assert sliced == pytest.approx(loss, abs=1e-10, rel=0)
    for key, gradient in gradients.items():
        assert torch.allclose(theirs[key], gradient, rtol=0, atol=1e-10), key


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("bert", {}, "prediction of the next token alone"),
        ("mamba", {}, "cannot run in slices of a sequence"),
    ],
)
def test_other_models_are_refused(name, config, says, text_folder) -> None:
    with pytest.raises(RaypipeError, match=says):
        model_of(name, text_folder, **config).slice_lengths(4)
