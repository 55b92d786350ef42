"""More families of transformers for ``python -m tests.bench.zoo``; none of them has a mechanism of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.zoo.families import (
    BART,
    BATCH,
    CALM,
    FLOAT32,
    GPT2,
    GROUPED,
    HEAD,
    PAD,
    SEQUENCE,
    SMALL,
    SPEECH,
    VIT,
    Family,
    hf,
    images,
    spectrograms,
    tokens,
    waveforms,
)

PAIRS = partial(tokens, decoder=True)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _boxes() -> dict[str, Tensor]:
    corners = torch.randint(0, 31, (BATCH, SEQUENCE, 4), generator=_draw()).sort(-1)[0]
    return {**tokens(), "bbox": corners}


def _speech(length: int = 2000) -> dict[str, Tensor]:
    """Waveforms and tokens."""
    rows = spectrograms()
    del rows["input_features"]
    return {"input_values": torch.randn(BATCH, length, generator=_draw()), **rows}


def _frames() -> dict[str, Tensor]:
    return {**spectrograms(), "input_features": torch.randn(BATCH, 30, 16, generator=_draw())}


def _as_it_is(
    kind: str, config: dict[str, Any], rows: Callable[[], dict[str, Tensor]] = tokens, **model: Any
) -> Family:
    return replace(hf(kind, config, rows, **model), left=1.0)


MORE: dict[str, Family] = {
    **{name: hf(name, {**GROUPED, **PAD}) for name in ("nemotron", "olmo", "apertus", "arcee")},
    **{name: hf(name, {**HEAD, **PAD}) for name in ("ernie4_5", "hunyuan_v1_dense", "helium", "seed_oss")},
    "granitemoe": hf("granitemoe", {**GROUPED, **PAD, **EXPERTS}),
    "phimoe": hf("phimoe", {**GROUPED, **PAD, **EXPERTS}),
    "jetmoe": _as_it_is("jetmoe", {"hidden_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2,
                                   "kv_channels": 8, "intermediate_size": 24, **EXPERTS, "vocab_size": 40,
                                   "max_position_embeddings": 32, **PAD}),
    "lfm2": hf("lfm2", {**GROUPED, **PAD, "layer_types": ["conv", "full_attention"]}),
    "minimax": hf("minimax", {**HEAD, **PAD, **EXPERTS, "block_size": 4,
                              "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3_next": replace(hf("qwen3_next", {
        **HEAD, **PAD, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    }, as_it_is=["Qwen3NextGatedDeltaNet"], tolerance=FLOAT32), left=0.2),
    "gemma3n": _as_it_is("gemma3n_text", {
        **HEAD, **PAD, "vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "altup_num_inputs": 2, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4, "activation_sparsity_pattern": [0.0, 0.0],
    }, as_it_is=["Gemma3nTextDecoderLayer"]),
    "big_bird, block-sparse": _as_it_is("big_bird", {
        **SMALL, **PAD, **CALM, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1,
        "max_position_embeddings": 64,
    }, partial(tokens, length=32), as_it_is=["BigBirdBlockSparseAttention"]),
    "persimmon": hf("persimmon", {**SMALL, **PAD}),
    "biogpt": hf("biogpt", {**SMALL, **PAD}),
    "codegen": hf("codegen", {**GPT2, "rotary_dim": 4}),
    "openai-gpt": hf("openai-gpt", GPT2),
    "xglm": hf("xglm", {"d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2, "vocab_size": 40,
                        "max_position_embeddings": 32, **PAD}, refused="which is out of its range"),
    "convbert": hf("convbert", {**SMALL, **PAD, "embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 1}),
    "squeezebert": hf("squeezebert", {**SMALL, **PAD, "embedding_size": 16}),
    "mpnet": hf("mpnet", {**SMALL, **PAD}),
    "layoutlm": hf("layoutlm", {**SMALL, **PAD}, _boxes, task="masked-lm"),
    "roformer": hf("roformer", {**SMALL, **PAD, "embedding_size": 16}, task="masked-lm"),
    "rembert": hf("rembert", {**SMALL, **PAD, "input_embedding_size": 8, "output_embedding_size": 8},
                  task="masked-lm"),
    "megatron-bert": hf("megatron-bert", {**SMALL, **PAD}, task="masked-lm"),
    "esm": hf("esm", {**SMALL, **PAD, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "perceiver": hf("perceiver", {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1,
                                  "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
                                  "num_cross_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 7},
                    task="masked-lm"),
    "prophetnet": hf("prophetnet", {"hidden_size": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
                                    "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
                                    "num_decoder_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32,
                                    "ngram": 2, "num_buckets": 8, **PAD, "decoder_start_token_id": 1}, PAIRS),
    "umt5": hf("umt5", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40},
               PAIRS),
    "blenderbot": hf("blenderbot", BART, PAIRS),
    "bigbird_pegasus": hf("bigbird_pegasus", {**BART, "attention_type": "original_full"}, PAIRS),
    "m2m_100": _as_it_is("m2m_100", BART, PAIRS),
    "mobilenet_v2": hf("mobilenet_v2", {"image_size": 16, "depth_multiplier": 0.25}, images),
    "levit": hf("levit", {"image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 1, 1],
                          "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, partial(images, size=32)),
    "pvt": hf("pvt", {"image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                      "num_attention_heads": [1, 1, 2, 2]}, partial(images, size=32)),
    "focalnet": hf("focalnet", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1],
                                "focal_levels": [1, 1], "focal_windows": [3, 3], "hidden_sizes": [8, 16]},
                   partial(images, size=32)),
    "vit_msn": hf("vit_msn", VIT, images),
    "wavlm": hf("wavlm", SPEECH, waveforms, task="ctc"),
    "unispeech": hf("unispeech", SPEECH, waveforms, task="ctc"),
    "speech_to_text": hf("speech_to_text", {
        **{k: v for k, v in BART.items() if k != "max_position_embeddings"}, "max_source_positions": 64,
        "max_target_positions": 32, "input_feat_per_channel": 16, "conv_channels": 16,
    }, _frames),
    "moonshine": hf("moonshine", {
        "hidden_size": 16, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40,
        **PAD, "decoder_start_token_id": 1,
    }, _speech),
}  # fmt: skip
