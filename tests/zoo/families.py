"""The zoo: families of models, tiny, from configuration, with rows to train them on.

``SUITE`` names those that the test suite compares, one of each mechanism; ``python -m tests.bench.zoo`` takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

BATCH, MICROBATCH, SEQUENCE = 4, 2, 7
MODULES = "tests.zoo.modules"
EXACT = 1e-9
FLOAT32 = 1e-5
"""Of models that compute parts in float32 whatever their precision (norms, softmax, routers)."""


@dataclass(frozen=True)
class Family:
    """A model and what to train it on."""

    model: Mapping[str, Any]
    """The job's ``model`` section."""
    rows: Callable[[], dict[str, Tensor]]
    tolerance: float = EXACT
    left: float = 0.02
    """Most that may stay in B of the weight gradients' FLOPs; 1 for what cannot be captured."""
    refused: str = ""
    """Part of the message with which it is refused; empty if it trains."""


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def tokens(
    vocabulary: int = 40, classes: int | None = None, length: int = SEQUENCE, decoder: bool = False
) -> dict[str, Tensor]:
    """Tokens, labelled each by itself, or as a whole with one of ``classes``."""
    draw = _draw()
    rows = {"input_ids": torch.randint(3, vocabulary, (BATCH, length), generator=draw)}
    if classes is not None:
        return {**rows, "labels": torch.randint(classes, (BATCH,), generator=draw)}
    if decoder:
        rows["decoder_input_ids"] = torch.randint(3, vocabulary, (BATCH, length - 2), generator=draw)
        return {**rows, "labels": torch.randint(3, vocabulary, (BATCH, length - 2), generator=draw)}
    return {**rows, "labels": rows["input_ids"].clone()}


def images(name: str = "pixel_values", size: int = 16, classes: int = 2, each: int | None = None) -> dict[str, Tensor]:
    """Images with a label each, or a label for every pixel of ``each`` x ``each``."""
    draw = _draw()
    shape = (BATCH,) if each is None else (BATCH, each, each)
    return {
        name: torch.randn(BATCH, 3, size, size, generator=draw),
        "labels": torch.randint(classes, shape, generator=draw),
    }


def features(classes: int = 5) -> dict[str, Tensor]:
    """Sequences of vectors with a label each."""
    draw = _draw()
    return {
        "features": torch.randn(BATCH, SEQUENCE, 12, generator=draw),
        "labels": torch.randint(classes, (BATCH,), generator=draw),
    }


def waveforms(length: int = 400, labels: int = 3, vocabulary: int = 12) -> dict[str, Tensor]:
    """Speech and its transcript."""
    draw = _draw()
    return {
        "input_values": torch.randn(BATCH, length, generator=draw),
        "labels": torch.randint(1, vocabulary, (BATCH, labels), generator=draw),
    }


def spectrograms(bins: int = 16, frames: int = 30) -> dict[str, Tensor]:
    draw = _draw()
    return {
        "input_features": torch.randn(BATCH, bins, frames, generator=draw),
        "decoder_input_ids": torch.randint(3, 40, (BATCH, 5), generator=draw),
        "labels": torch.randint(3, 40, (BATCH, 5), generator=draw),
    }


def _own(name: str, rows: Callable[[], dict[str, Tensor]], refused: str = "", **args: Any) -> Family:
    model: dict[str, Any] = {"import": f"{MODULES}:{name}", "args": args}
    made = rows()
    if made["labels"].dim() == 2 and "input_ids" in made and "decoder_input_ids" not in made:
        model["task"] = "causal-lm"
    return Family(model, rows, refused=refused)


def _hf(kind: str, config: dict[str, Any], rows: Callable[[], dict[str, Tensor]] = tokens, tolerance: float = EXACT,
        refused: str = "", **model: Any) -> Family:  # fmt: skip
    return Family({"hf": kind, "config": config, **model}, rows, tolerance, refused=refused)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "vocab_size": 40, "max_position_embeddings": 32}  # fmt: skip
PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CALM = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
GROUPED = {**SMALL, "num_key_value_heads": 1}
HEAD = {**GROUPED, "head_dim": 8}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
        "max_position_embeddings": 32, **PAD, "decoder_start_token_id": 1}  # fmt: skip
WHISPER = {key: value for key, value in BART.items() if key != "max_position_embeddings"}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
       "image_size": 16, "patch_size": 4}  # fmt: skip
VIT_WITHOUT_MLP = {key: value for key, value in VIT.items() if key != "intermediate_size"}
WITHOUT_POSITIONS = {key: value for key, value in GROUPED.items() if key != "max_position_embeddings"}
GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 32}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPEECH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
          "vocab_size": 12,
          "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
          "apply_spec_augment": False}  # fmt: skip
TOWERS = {
    "text_config": {**SMALL, **PAD}, "vision_config": VIT, "projection_dim": 8,
}  # fmt: skip

OWN: dict[str, Family] = {
    "nn.TransformerEncoder": _own("Encoder", tokens),
    "nn.TransformerEncoder causal": _own("Encoder", tokens, causal=True, norm_first=True),
    "nn.Transformer": _own("Seq2Seq", partial(tokens, decoder=True)),
    "nn.MultiheadAttention": _own("Attention", features),
    "nn.LSTM": _own("Recurrent", partial(tokens, classes=5)),
    "nn.LSTM dropout": _own("Recurrent", partial(tokens, classes=5), dropout=0.2, bidirectional=True),
    "nn.GRU": _own("Recurrent", partial(tokens, classes=5), kind="GRU"),
    "nn.GRU dropout": _own("Recurrent", partial(tokens, classes=5), kind="GRU", dropout=0.2),
    "nn.RNN": _own("Recurrent", partial(tokens, classes=5), kind="RNN"),
    "stochastic depth": _own("StochasticDepth", partial(images, "image", classes=5)),
    "noise": _own("Noise", features),
    "weight_norm": _own("Normalised", features),
    "orthogonal": _own("Normalised", features, kind="orthogonal"),
    "spectral_norm": _own("Normalised", features, kind="spectral_norm", refused="in every forward"),
    "nn.EmbeddingBag": _own("Bags", partial(tokens, classes=5)),
    "expert tensors": _own("Experts", tokens),
    "U-Net": _own("Convolutions", partial(images, "image", classes=5, each=16)),
    "a dict": _own("TakesDict", lambda: {**features(), "input_ids": tokens()["input_ids"]}),
    "a part that branches": replace(_own("Stepwise", features), left=1.0),
    "a model that branches": replace(_own("AllBranches", features), left=1.0),
}
TEXT: dict[str, Family] = {
    "gpt2": _hf("gpt2", GPT2),
    "gpt_neo": _hf("gpt_neo", {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 40,
                               "attention_types": [[["global", "local"], 1]], "window_size": 4,
                               "max_position_embeddings": 32}),
    "gpt_neox": _hf("gpt_neox", SMALL),
    "gptj": _hf("gptj", {**GPT2, "rotary_dim": 4}),
    "gpt_bigcode": _hf("gpt_bigcode", GPT2),
    "opt": _hf("opt", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
                       "vocab_size": 40, "word_embed_proj_dim": 16, "max_position_embeddings": 32}),
    "bloom": _hf("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}),
    "falcon": _hf("falcon", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}),
    "mpt": _hf("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 40, "max_seq_len": 32}),
    "llama": _hf("llama", GROUPED),
    "mistral": _hf("mistral", {**GROUPED, "sliding_window": 4}),
    "qwen2": _hf("qwen2", GROUPED),
    "qwen3": _hf("qwen3", HEAD),
    "gemma": _hf("gemma", HEAD),
    "gemma2": _hf("gemma2", HEAD),
    "gemma3": _hf("gemma3_text", HEAD),
    "phi": _hf("phi", SMALL),
    "phi3": _hf("phi3", {**GROUPED, **PAD}),
    "olmo2": _hf("olmo2", GROUPED),
    "cohere": _hf("cohere", {**GROUPED, **PAD}),
    "starcoder2": _hf("starcoder2", GROUPED),
    "granite": _hf("granite", GROUPED),
    "smollm3": _hf("smollm3", {**GROUPED, **PAD}),
    "stablelm": _hf("stablelm", GROUPED),
    "glm": _hf("glm", {**HEAD, **PAD}),
    "ctrl": _hf("ctrl", {"n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}),
    "rwkv": _hf("rwkv", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "attention_hidden_size": 16,
                         "intermediate_size": 24}),
    "mamba": _hf("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4},
                  tolerance=FLOAT32),
    "mamba2": _hf("mamba2", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4,
                             "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, tolerance=FLOAT32),
    "recurrent_gemma": replace(_hf("recurrent_gemma", {**WITHOUT_POSITIONS, "lru_width": 16,
                                                       "attention_window_size": 8}), left=1.0),
    "yoso": replace(_hf("yoso", {**SMALL, **PAD, **CALM}), left=0.5),
    "glm4": _hf("glm4", {**HEAD, **PAD}),
    "llama4": _hf("llama4_text", {**HEAD, **PAD, "intermediate_size_mlp": 24, "num_local_experts": 4,
                                  "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
    "zamba2": _hf("zamba2", {**SMALL, **PAD, "num_hidden_layers": 3, "num_key_value_heads": 2, "hybrid_layer_ids": [1],
                             "layer_types": ["mamba", "hybrid", "mamba"], "mamba_d_state": 4, "mamba_headdim": 8,
                             "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4, "attention_head_dim": 16,
                             "num_mem_blocks": 1, "use_mamba_kernels": False}),
    "bamba": _hf("bamba", {**GROUPED, **PAD, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8,
                           "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}),
    "xlstm": _hf("xlstm", {"hidden_size": 32, "embedding_dim": 32, "num_hidden_layers": 2, "num_blocks": 2,
                           "num_heads": 2, "vocab_size": 40, "chunk_size": 8, **PAD}),
    "fnet": _hf("fnet", {**{k: v for k, v in SMALL.items() if k != "num_attention_heads"}, **PAD,
                         "tpu_short_seq_length": SEQUENCE}),
    "nystromformer": _hf("nystromformer", {**SMALL, **PAD, "num_landmarks": 8, "segment_means_seq_len": 8},
                         partial(tokens, length=8)),
    "data2vec text": _hf("data2vec-text", {**SMALL, **PAD}, task="masked-lm"),
    "mixtral": _hf("mixtral", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": _hf("qwen2_moe", {**GROUPED, **MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": _hf("qwen3_moe", {**GROUPED, **MOE}),
    "olmoe": _hf("olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": _hf("gpt_oss", {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "deepseek_v2": _hf("deepseek_v2", {**SMALL, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
                                       "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
                                       "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
                                       "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": _hf("deepseek_v3", {**SMALL, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8,
                                       "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                                       "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                       "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
                                       "topk_group": 1}, tolerance=FLOAT32),
    "bert": _hf("bert", SMALL),
    "roberta": _hf("roberta", {**SMALL, **PAD}),
    "distilbert": _hf("distilbert", {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": 40}),
    "albert": _hf("albert", {**SMALL, "embedding_size": 8, **PAD}),
    "electra": _hf("electra", {**SMALL, "embedding_size": 8}, task="masked-lm"),
    "deberta_v2": _hf("deberta-v2", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                       tolerance=FLOAT32),
    "modernbert": _hf("modernbert", {**SMALL, **PAD, "cls_token_id": 1, "sep_token_id": 2}),
    "switch, mask": replace(
        _hf("switch_transformers", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
                                    "vocab_size": 40, "num_experts": 4, "num_sparse_encoder_layers": 1,
                                    "num_sparse_decoder_layers": 1, "dropout_rate": 0.0, "router_jitter_noise": 0.0},
            lambda: {**tokens(decoder=True), "attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64)},
            tolerance=FLOAT32), left=0.5,
    ),
    "longformer": replace(_hf("longformer", {**SMALL, **PAD, **CALM, "attention_window": [4, 4]}), left=1.0),
    "led": replace(_hf("led", {**{k: v for k, v in BART.items() if k != "max_position_embeddings"}, "dropout": 0.0,
                               "attention_window": [4], "max_encoder_position_embeddings": 32,
                               "max_decoder_position_embeddings": 32}, partial(tokens, decoder=True)), left=1.0),
    "xlnet": _hf("xlnet", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 40}),
    "funnel": _hf("funnel", {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1],
                             "vocab_size": 40}),
    "t5": _hf("t5", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40},
              partial(tokens, decoder=True)),
    "bart": _hf("bart", BART, partial(tokens, decoder=True)),
    "mbart": _hf("mbart", BART, partial(tokens, decoder=True)),
    "marian": _hf("marian", {**BART, "pad_token_id": 0}, partial(tokens, decoder=True)),
    "pegasus": _hf("pegasus", {k: v for k, v in BART.items() if k != "bos_token_id"}, partial(tokens, decoder=True)),
    "switch": _hf("switch_transformers", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
                                          "vocab_size": 40, "num_experts": 4, "num_sparse_encoder_layers": 1,
                                          "num_sparse_decoder_layers": 1}, partial(tokens, decoder=True),
                  refused="needs attention_mask"),
    "classification": _hf("llama", {**GROUPED, **PAD}, partial(tokens, classes=2),
                          task="classification"),
}  # fmt: skip
SEEN: dict[str, Family] = {
    "vit": _hf("vit", VIT, images),
    "deit": _hf("deit", VIT, images),
    "beit": _hf("beit", {**VIT, "drop_path_rate": 0.3}, images),
    "dinov2": _hf("dinov2", {**VIT_WITHOUT_MLP, "drop_path_rate": 0.3}, images),
    "resnet": _hf("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
                  images, batch_norm="frozen"),
    "convnext": _hf("convnext", {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1], "drop_path_rate": 0.3,
                                 "image_size": 64}, partial(images, size=64)),
    "convnextv2": _hf("convnextv2", {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1], "drop_path_rate": 0.3,
                                     "image_size": 64}, partial(images, size=64)),
    "swin": _hf("swin", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                         "window_size": 4, "drop_path_rate": 0.3}, partial(images, size=32)),
    "swinv2": _hf("swinv2", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                             "window_size": 4, "drop_path_rate": 0.3}, partial(images, size=32)),
    "segformer": _hf("segformer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
                                   "num_attention_heads": [1, 1, 2, 2], "drop_path_rate": 0.3},
                     partial(images, size=64), task="classification"),
    "segformer, pixels": _hf("segformer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                                           "decoder_hidden_size": 16, "num_attention_heads": [1, 1, 2, 2],
                                           }, partial(images, size=64, classes=2, each=64),
                             task="segmentation", batch_norm="frozen"),
    "regnet": _hf("regnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
                  images, batch_norm="frozen"),
    "mobilevit": _hf("mobilevit", {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 8, 8, 8, 8],
                                   "num_attention_heads": 2, "image_size": 64}, partial(images, size=64),
                     batch_norm="frozen"),
    "poolformer": _hf("poolformer", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "drop_path_rate": 0.3},
                      partial(images, size=64)),
}  # fmt: skip
HEARD: dict[str, Family] = {
    "whisper": _hf("whisper", {**WHISPER, "num_mel_bins": 16, "max_source_positions": 15, "max_target_positions": 16},
                   spectrograms),
    "wav2vec2": _hf("wav2vec2", SPEECH, waveforms, task="ctc"),
    "hubert": _hf("hubert", SPEECH, waveforms, task="ctc"),
    "clip": _hf("clip", TOWERS, lambda: {"input_ids": tokens()["input_ids"], "pixel_values": images()["pixel_values"]},
                task="contrastive"),
    "siglip": _hf("siglip", {"text_config": {**SMALL, **PAD, "projection_size": 16}, "vision_config": VIT},
                  lambda: {"input_ids": tokens()["input_ids"], "pixel_values": images()["pixel_values"]},
                  task="contrastive"),
    "blip": _hf("blip", {"text_config": {**SMALL, **PAD, "encoder_hidden_size": 16}, "vision_config": VIT,
                         "projection_dim": 8}, lambda: {**tokens(), "pixel_values": images()["pixel_values"]}),
    "llava": _hf("llava", {"text_config": {"model_type": "llama", **GROUPED}, "image_token_id": 39,
                           "vision_config": {"model_type": "clip_vision_model", **VIT},
                           "image_seq_length": 16}, lambda: _with_images()),
    "vipllava": _hf("vipllava", {"text_config": {"model_type": "llama", **GROUPED}, "image_token_id": 39,
                                 "vision_config": {"model_type": "clip_vision_model", **VIT},
                                 "vision_feature_layers": [-2, -1]}, lambda: _with_images()),
    "paligemma": _hf("paligemma", {"text_config": {"model_type": "gemma", **HEAD}, "image_token_id": 39,
                                   "vision_config": {"model_type": "siglip_vision_model", **VIT,
                                                     "vision_use_head": False}, "projection_dim": 16,
                                   "hidden_size": 16},
                     lambda: {**_with_images(), "token_type_ids": torch.arange(20).gt(17).long().repeat(BATCH, 1)}),
    "paligemma, no types": _hf("paligemma", {"text_config": {"model_type": "gemma", **HEAD}, "image_token_id": 39,
                                             "vision_config": {"model_type": "siglip_vision_model", **VIT}},
                               lambda: _with_images(), refused="needs token_type_ids"),
}  # fmt: skip


def _with_images() -> dict[str, Tensor]:
    ids = tokens(vocabulary=38, length=20)["input_ids"]
    ids[:, 2:18] = 39
    return {"input_ids": ids, "pixel_values": images()["pixel_values"], "labels": ids.clone()}


FAMILIES = {**OWN, **TEXT, **SEEN, **HEARD}
