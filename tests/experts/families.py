"""Tiny mixture-of-experts models of the families in which experts may be divided."""

from __future__ import annotations

from typing import Any

SMALL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "head_dim": 8,
}
NARROW = {**SMALL, "moe_intermediate_size": 8}
LATENT = {
    **NARROW,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen2_moe": {**NARROW, "num_experts": 4, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {**NARROW, "num_experts": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {**SMALL, "num_local_experts": 4, "sliding_window": 8},
    "olmoe": {**SMALL, "num_experts": 4},
    "glm4_moe": {**NARROW, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {
        **NARROW,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
}
