"""A divided model of every family computes what the whole one does: logits, loss and all gradients, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from raypipe.tensor import divide, table_for
from tests.tensor.threads import run_tensor_ranks

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 32}),
    "opt": ("OPTForCausalLM", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 61,
        "word_embed_proj_dim": 16, "max_position_embeddings": 32,
    }),
    "llama": ("LlamaForCausalLM", {**GROUPED, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 6}),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "bert": ("BertForMaskedLM", SMALL),
    "roberta": ("RobertaForMaskedLM", SMALL),
    "t5": ("T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61,
        "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
    }),
    "vit": ("ViTForImageClassification", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
        "patch_size": 4, "num_labels": 3,
    }),
}  # fmt: skip
"""Sizes that tell the dimensions apart, and a vocabulary that divides by nothing."""


def whole_model(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    kind, changes = FAMILIES[family]
    cls = getattr(transformers, kind)
    torch.manual_seed(7)
    model = cls(cls.config_class(**changes)).double().eval()  # eval: no dropout
    for parameter in model.parameters():  # norms start at one and biases at zero, which would hide mistakes
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    if family == "vit":
        return model, {"pixel_values": torch.randn(3, 3, 16, 16).double(), "labels": torch.tensor([0, 2, 1])}
    ids = torch.randint(1, 61, (3, 10))
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = 0, 0  # padding
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(("family", "size"), [*((family, 2) for family in FAMILIES), ("gpt2", 4), ("t5", 4)])
def test_parity(family: str, size: int) -> None:
    model, data = whole_model(family)
    table = table_for(model.config.model_type)

    def work(rank: int, tensor_rank: object) -> tuple[object, ...]:
        own = copy.deepcopy(model)
        shards = divide(own, table, own.config, size, rank)
        result = own(**data)
        result.loss.backward()
        return result.logits.detach(), result.loss.item(), gradients(own), shards

    tensor_ranks = run_tensor_ranks(size, work)
    expected = model(**data)
    expected.loss.backward()
    wanted = gradients(model)
    shards = tensor_ranks[0][3]
    assert sum(shards[n].cut(p, 0).numel() for n, p in model.named_parameters() if n in shards) * size < 1.05 * sum(
        p.numel() for n, p in model.named_parameters() if n in shards
    )
    for logits, loss, found, _ in tensor_ranks:
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-9)
        assert loss == pytest.approx(expected.loss.item(), abs=1e-9)
        assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        shares = [found[name] for _, _, found, _ in tensor_ranks]
        if name in shards:
            shares = [shards[name].join(shares)]
        for share in shares:
            torch.testing.assert_close(share, gradient, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
