"""The zoo: families of models, tiny, from configuration, with rows to train them on.

``SUITE`` in ``test_zoo.py`` names those that the test suite compares, one of each mechanism; ``python -m
tests.bench.zoo`` takes all, and ``more_families.py`` too.
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


def _odd(name: str, rows: Callable[[], dict[str, Tensor]] = features, left: float = 0.02, refused: str = "",
         **args: Any) -> Family:  # fmt: skip
    return Family({"import": f"tests.zoo.odd_modules:{name}", "args": args}, rows, left=left, refused=refused)


def hf(kind: str, config: dict[str, Any], rows: Callable[[], dict[str, Tensor]] = tokens, tolerance: float = EXACT,
        refused: str = "", **model: Any) -> Family:  # fmt: skip
    """Return a family of transformers; ``model`` are further keys of the job's section."""
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
ODD: dict[str, Family] = {
    "forward hooks": _odd("ForwardHooks"),
    "a backward hook": _odd("BackwardHook", left=0.6),
    "hooks on what runs as it is": _odd("HooksAsItIs", left=0.6),
    "a tensor's hook": _odd("TensorHook", left=1.0),
    "a parameter's hook": _odd("ParameterHook", refused="inner.weight: it has a hook on its gradient"),
    "checkpoint": _odd("Checkpoints", use_reentrant=False),
    "checkpoint, older form": _odd("Checkpoints", use_reentrant=True),
    "vmap": _odd("Mapped"),
    "forces": _odd("Forces", left=1.0),
    "experts by masks": _odd("MaskedExperts", left=0.81),
    "chosen places": _odd("Chosen", left=1.0),
    "**kwargs": _odd("Keywords"),
    "a drawn buffer": _odd("DrawnBuffer"),
    "a drawn buffer, as it is": _odd("DrawnBuffer", branches=True, left=1.0),
    "drawn by numpy": _odd("DrawnByNumpy"),
    "nn.LazyLinear": _odd("Lazy", refused="LazyLinear gives it a shape in its first forward only"),
    "counts in a buffer, as it is": _odd("CountsAsItIs", refused="writes its buffer calls in a forward"),
    "a dataclass": _odd("Structured"),
    "complex numbers": _odd("Spectrum"),
    "nn.LSTM projected": _odd("Projected"),
    "packed GRU": _odd("Packed", partial(tokens, classes=5), left=1.0),
    "packed LSTM": _odd("Packed", partial(tokens, classes=5), left=1.0, kind="LSTM"),
    "writes in place": _odd("WritesInPlace"),
}
TEXT: dict[str, Family] = {
    "gpt2": hf("gpt2", GPT2),
    "gpt_neo": hf("gpt_neo", {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 40,
                               "attention_types": [[["global", "local"], 1]], "window_size": 4,
                               "max_position_embeddings": 32}),
    "gpt_neox": hf("gpt_neox", SMALL),
    "gptj": hf("gptj", {**GPT2, "rotary_dim": 4}),
    "gpt_bigcode": hf("gpt_bigcode", GPT2),
    "opt": hf("opt", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
                       "vocab_size": 40, "word_embed_proj_dim": 16, "max_position_embeddings": 32}),
    "bloom": hf("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}),
    "falcon": hf("falcon", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}),
    "mpt": hf("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 40, "max_seq_len": 32}),
    "llama": hf("llama", GROUPED),
    "mistral": hf("mistral", {**GROUPED, "sliding_window": 4}),
    "qwen2": hf("qwen2", GROUPED),
    "qwen3": hf("qwen3", HEAD),
    "gemma": hf("gemma", HEAD),
    "gemma2": hf("gemma2", HEAD),
    "gemma3": hf("gemma3_text", HEAD),
    "phi": hf("phi", SMALL),
    "phi3": hf("phi3", {**GROUPED, **PAD}),
    "olmo2": hf("olmo2", GROUPED),
    "cohere": hf("cohere", {**GROUPED, **PAD}),
    "starcoder2": hf("starcoder2", GROUPED),
    "granite": hf("granite", GROUPED),
    "smollm3": hf("smollm3", {**GROUPED, **PAD}),
    "stablelm": hf("stablelm", GROUPED),
    "glm": hf("glm", {**HEAD, **PAD}),
    "ctrl": hf("ctrl", {"n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32}),
    "rwkv": hf("rwkv", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "attention_hidden_size": 16,
                         "intermediate_size": 24}),
    "mamba": hf("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4},
                  tolerance=FLOAT32),
    "mamba2": hf("mamba2", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 4,
                             "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, tolerance=FLOAT32),
    "recurrent_gemma": replace(hf("recurrent_gemma", {**WITHOUT_POSITIONS, "lru_width": 16,
                                                       "attention_window_size": 8}), left=1.0),
    "yoso": replace(hf("yoso", {**SMALL, **PAD, **CALM}), left=0.5),
    "glm4": hf("glm4", {**HEAD, **PAD}),
    "llama4": hf("llama4_text", {**HEAD, **PAD, "intermediate_size_mlp": 24, "num_local_experts": 4,
                                  "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
    "zamba2": hf("zamba2", {**SMALL, **PAD, "num_hidden_layers": 3, "num_key_value_heads": 2, "hybrid_layer_ids": [1],
                             "layer_types": ["mamba", "hybrid", "mamba"], "mamba_d_state": 4, "mamba_headdim": 8,
                             "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4, "attention_head_dim": 16,
                             "num_mem_blocks": 1, "use_mamba_kernels": False}),
    "bamba": hf("bamba", {**GROUPED, **PAD, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8,
                           "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}),
    "xlstm": hf("xlstm", {"hidden_size": 32, "embedding_dim": 32, "num_hidden_layers": 2, "num_blocks": 2,
                           "num_heads": 2, "vocab_size": 40, "chunk_size": 8, **PAD}),
    "fnet": hf("fnet", {**{k: v for k, v in SMALL.items() if k != "num_attention_heads"}, **PAD,
                         "tpu_short_seq_length": SEQUENCE}),
    "nystromformer": hf("nystromformer", {**SMALL, **PAD, "num_landmarks": 8, "segment_means_seq_len": 8},
                         partial(tokens, length=8)),
    "data2vec text": hf("data2vec-text", {**SMALL, **PAD}, task="masked-lm"),
    "mixtral": hf("mixtral", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": hf("qwen2_moe", {**GROUPED, **MOE, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": hf("qwen3_moe", {**GROUPED, **MOE}),
    "olmoe": hf("olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": hf("gpt_oss", {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "deepseek_v2": hf("deepseek_v2", {**SMALL, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
                                       "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
                                       "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
                                       "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": hf("deepseek_v3", {**SMALL, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8,
                                       "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                                       "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                                       "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
                                       "topk_group": 1}, tolerance=FLOAT32),
    "bert": hf("bert", SMALL),
    "roberta": hf("roberta", {**SMALL, **PAD}),
    "distilbert": hf("distilbert", {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": 40}),
    "albert": hf("albert", {**SMALL, "embedding_size": 8, **PAD}),
    "electra": hf("electra", {**SMALL, "embedding_size": 8}, task="masked-lm"),
    "deberta_v2": hf("deberta-v2", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                       tolerance=FLOAT32),
    "modernbert": hf("modernbert", {**SMALL, **PAD, "cls_token_id": 1, "sep_token_id": 2}),
    "switch, mask": replace(
        hf("switch_transformers", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
                                    "vocab_size": 40, "num_experts": 4, "num_sparse_encoder_layers": 1,
                                    "num_sparse_decoder_layers": 1, "dropout_rate": 0.0, "router_jitter_noise": 0.0},
            lambda: {**tokens(decoder=True), "attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64)},
            tolerance=FLOAT32), left=0.5,
    ),
    "longformer": replace(hf("longformer", {**SMALL, **PAD, **CALM, "attention_window": [4, 4]}), left=1.0),
    "led": replace(hf("led", {**{k: v for k, v in BART.items() if k != "max_position_embeddings"}, "dropout": 0.0,
                               "attention_window": [4], "max_encoder_position_embeddings": 32,
                               "max_decoder_position_embeddings": 32}, partial(tokens, decoder=True)), left=1.0),
    "xlnet": hf("xlnet", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 40}),
    "funnel": hf("funnel", {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1],
                             "vocab_size": 40}),
    "t5": hf("t5", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40},
              partial(tokens, decoder=True)),
    "bart": hf("bart", BART, partial(tokens, decoder=True)),
    "mbart": hf("mbart", BART, partial(tokens, decoder=True)),
    "marian": hf("marian", {**BART, "pad_token_id": 0}, partial(tokens, decoder=True)),
    "pegasus": hf("pegasus", {k: v for k, v in BART.items() if k != "bos_token_id"}, partial(tokens, decoder=True)),
    "switch": hf("switch_transformers", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
                                          "vocab_size": 40, "num_experts": 4, "num_sparse_encoder_layers": 1,
                                          "num_sparse_decoder_layers": 1}, partial(tokens, decoder=True),
                  refused="needs attention_mask"),
    "classification": hf("llama", {**GROUPED, **PAD}, partial(tokens, classes=2),
                          task="classification"),
}  # fmt: skip
SEEN: dict[str, Family] = {
    "vit": hf("vit", VIT, images),
    "deit": hf("deit", VIT, images),
    "beit": hf("beit", {**VIT, "drop_path_rate": 0.3}, images),
    "dinov2": hf("dinov2", {**VIT_WITHOUT_MLP, "drop_path_rate": 0.3}, images),
    "resnet": hf("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
                  images, batch_norm="frozen"),
    "convnext": hf("convnext", {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1], "drop_path_rate": 0.3,
                                 "image_size": 64}, partial(images, size=64)),
    "convnextv2": hf("convnextv2", {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1], "drop_path_rate": 0.3,
                                     "image_size": 64}, partial(images, size=64)),
    "swin": hf("swin", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                         "window_size": 4, "drop_path_rate": 0.3}, partial(images, size=32)),
    "swinv2": hf("swinv2", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                             "window_size": 4, "drop_path_rate": 0.3}, partial(images, size=32)),
    "segformer": hf("segformer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
                                   "num_attention_heads": [1, 1, 2, 2], "drop_path_rate": 0.3},
                     partial(images, size=64), task="classification"),
    "segformer, pixels": hf("segformer", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                                           "decoder_hidden_size": 16, "num_attention_heads": [1, 1, 2, 2],
                                           }, partial(images, size=64, classes=2, each=64),
                             task="segmentation", batch_norm="frozen"),
    "regnet": hf("regnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
                  images, batch_norm="frozen"),
    "mobilevit": hf("mobilevit", {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 8, 8, 8, 8],
                                   "num_attention_heads": 2, "image_size": 64}, partial(images, size=64),
                     batch_norm="frozen"),
    "poolformer": hf("poolformer", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "drop_path_rate": 0.3},
                      partial(images, size=64)),
}  # fmt: skip
HEARD: dict[str, Family] = {
    "whisper": hf("whisper", {**WHISPER, "num_mel_bins": 16, "max_source_positions": 15, "max_target_positions": 16},
                   spectrograms),
    "wav2vec2": hf("wav2vec2", SPEECH, waveforms, task="ctc"),
    "hubert": hf("hubert", SPEECH, waveforms, task="ctc"),
    "clip": hf("clip", TOWERS, lambda: {"input_ids": tokens()["input_ids"], "pixel_values": images()["pixel_values"]},
                task="contrastive"),
    "siglip": hf("siglip", {"text_config": {**SMALL, **PAD, "projection_size": 16}, "vision_config": VIT},
                  lambda: {"input_ids": tokens()["input_ids"], "pixel_values": images()["pixel_values"]},
                  task="contrastive"),
    "blip": hf("blip", {"text_config": {**SMALL, **PAD, "encoder_hidden_size": 16}, "vision_config": VIT,
                         "projection_dim": 8}, lambda: {**tokens(), "pixel_values": images()["pixel_values"]}),
    "llava": hf("llava", {"text_config": {"model_type": "llama", **GROUPED}, "image_token_id": 39,
                           "vision_config": {"model_type": "clip_vision_model", **VIT},
                           "image_seq_length": 16}, lambda: _with_images()),
    "vipllava": hf("vipllava", {"text_config": {"model_type": "llama", **GROUPED}, "image_token_id": 39,
                                 "vision_config": {"model_type": "clip_vision_model", **VIT},
                                 "vision_feature_layers": [-2, -1]}, lambda: _with_images()),
    "paligemma": hf("paligemma", {"text_config": {"model_type": "gemma", **HEAD}, "image_token_id": 39,
                                   "vision_config": {"model_type": "siglip_vision_model", **VIT,
                                                     "vision_use_head": False}, "projection_dim": 16,
                                   "hidden_size": 16},
                     lambda: {**_with_images(), "token_type_ids": torch.arange(20).gt(17).long().repeat(BATCH, 1)}),
    "paligemma, no types": hf("paligemma", {"text_config": {"model_type": "gemma", **HEAD}, "image_token_id": 39,
                                             "vision_config": {"model_type": "siglip_vision_model", **VIT}},
                               lambda: _with_images(), refused="needs token_type_ids"),
}  # fmt: skip
LONGER = {**GROUPED, "max_position_embeddings": 64}
QWEN_TEXT = {**GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN_TOKENS = {"image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36}


def _images_of_values(tokens_each: list[int], **arrays: Tensor) -> dict[str, Tensor]:
    """Tokens with so many image tokens in each sample, and the images with what says how large they are."""
    ids = tokens(vocabulary=34, length=max(tokens_each) + 6)["input_ids"]
    for row, count in zip(ids, tokens_each, strict=True):
        row[2 : 2 + count] = 39
    return {"input_ids": ids, "labels": ids.clone(), **arrays}


def _pictures(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=_draw())


def _of_two_sizes() -> dict[str, Tensor]:
    """Wide and high images of LLaVA-NeXT, which have a token for each end of a line."""
    sizes = torch.tensor([[16, 32], [32, 16], [16, 32], [32, 16]])
    return _images_of_values([52, 56, 52, 56], pixel_values=_pictures(3, 3, 16, 16), image_sizes=sizes)


def _of_one_size() -> dict[str, Tensor]:
    sizes = torch.tensor([[16, 16]] * BATCH)
    return _images_of_values([4] * BATCH, pixel_values=_pictures(3, 16, 16), image_sizes=sizes)


def _several() -> dict[str, Tensor]:
    """Two images a sample, of which some are padding."""
    pictures = _pictures(2, 3, 16, 16)
    pictures[1::2, 1] = 0
    mask = torch.ones(BATCH, 2, 16, 16, dtype=torch.int64)
    return _images_of_values([8, 4, 8, 4], pixel_values=pictures, pixel_attention_mask=mask)


def _grids() -> dict[str, Tensor]:
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    rows = _images_of_values([4] * BATCH, pixel_values=_pictures(16, 3 * 2 * 16), image_grid_thw=grid)
    return {**rows, "mm_token_type_ids": (rows["input_ids"] == 39).long()}


def _as_it_is(kind: str, config: dict[str, Any], rows: Callable[[], dict[str, Tensor]]) -> Family:
    return replace(hf(kind, config, rows), left=1.0)


IMAGES_OF_VALUES: dict[str, Family] = {
    "llava_next": _as_it_is("llava_next", {
        "text_config": {"model_type": "llama", **LONGER}, "vision_config": {"model_type": "clip_vision_model", **VIT},
        "image_token_id": 39, "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]], "image_seq_length": 16,
    }, _of_two_sizes),
    "mistral3": _as_it_is("mistral3", {
        "text_config": {"model_type": "mistral", **GROUPED}, "image_token_id": 39, "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", **VIT, "head_dim": 8},
    }, _of_one_size),
    "idefics3": _as_it_is("idefics3", {
        "text_config": {"model_type": "llama", **GROUPED, "pad_token_id": 0}, "vision_config": VIT,
        "image_token_id": 39, "scale_factor": 2,
    }, _several),
    "smolvlm": _as_it_is("smolvlm", {
        "text_config": {"model_type": "llama", **GROUPED, "pad_token_id": 0}, "vision_config": VIT,
        "image_token_id": 39, "scale_factor": 2,
    }, _several),
    "qwen2_vl": _as_it_is("qwen2_vl", {
        "text_config": QWEN_TEXT, **QWEN_TOKENS,
        "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2,
                          "patch_size": 4},
    }, _grids),
    "qwen2_5_vl": _as_it_is("qwen2_5_vl", {
        "text_config": QWEN_TEXT, **QWEN_TOKENS,
        "vision_config": {"depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2,
                          "intermediate_size": 24, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
    }, _grids),
}  # fmt: skip
"""Models of images whose number of tokens follows from values: the whole model is tried on rows of the data."""


def _with_images() -> dict[str, Tensor]:
    ids = tokens(vocabulary=38, length=20)["input_ids"]
    ids[:, 2:18] = 39
    return {"input_ids": ids, "pixel_values": images()["pixel_values"], "labels": ids.clone()}


FAMILIES = {**OWN, **ODD, **TEXT, **SEEN, **HEARD, **IMAGES_OF_VALUES}
