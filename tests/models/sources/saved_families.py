"""A small model of any family of transformers, saved: what stages would start with, and what an export holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from raypipe.capture.meta import build_without_memory
from raypipe.checkpoint import commit, write_shard
from raypipe.errors import SpecError
from raypipe.job import HfSpec
from raypipe.models.sources.hugging_face import HuggingFace
from raypipe.observe.run_dir import RECORD
from raypipe.trained import export
from tests.job_files import minimal_job

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth", "predictor_depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("vocab_size", "entity_vocab_size", "char_vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    "head_dim": 16, "d_kv": 16, "num_labels": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "entity_emb_size": 16, "n_inner": 48, "vision_feature_layer": -1, "kv_lora_rank": 16, "q_lora_rank": 16,
}  # fmt: skip
"""Sizes by the names that configurations have for them."""
MOST = 40_000_000
"""Parameters of a model that is small."""
KEPT_OUT = 3
"""Number of the parameter that the checkpoint of the exported run does not hold, as one that forward does not use."""


class LeftOutError(Exception):
    """A family cannot be compared; the message says why."""


def small_config(kind: str) -> Any:
    """Return a configuration of a small model of this type.

    Raises:
        LeftOutError: none of those tried can be built.
    """
    if kind not in CONFIG_MAPPING_NAMES:
        raise LeftOutError("it has no configuration of its own")
    said = ""
    for config in _configs(kind):
        try:
            source = _source(config)
            count = sum(p.numel() for p in build_without_memory(source.build).parameters())
        except Exception as error:  # the library raises many classes
            said = said or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        if count <= MOST:
            return source.config
        said = f"its smallest configuration here has {count / 1e6:.0f} million parameters"
    raise LeftOutError(said)


def _configs(kind: str) -> Iterator[Any]:
    """Try all small sizes, then fewer of them, then the library's own sizes with few layers."""
    sizes = ({"hidden_size", "d_model", "n_embd", "dim", "embed_dim"}, {"head_dim"}, {"num_attention_heads"})
    layers = {name for name, value in SMALL.items() if value == 2 and "layer" in name}
    words = {"vocab_size"}
    chosen = [set(SMALL)]
    chosen += [set(SMALL) - left for left in sizes]
    chosen += [set(SMALL) - {"num_key_value_heads"}, layers | words, layers, words, set()]
    for names in chosen:
        try:
            config = transformers.AutoConfig.for_model(kind)
            parts = config.to_dict()
            yield transformers.AutoConfig.for_model(kind, **_shrunk(parts, names))
        except Exception:  # the library raises many classes
            continue


def _shrunk(says: dict[str, Any], names: set[str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    short = any(name in names and "layer" in name for name in says)
    for name, value in says.items():
        if isinstance(value, dict) and ("model_type" in value or name.endswith("config")):
            changed[name] = {**value, **_shrunk(value, names)}
        elif name in names and name in SMALL and type(value) in (int, type(SMALL[name])):
            changed[name] = SMALL[name]
        elif short and name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            changed[name] = [value[0], value[-1]]
    return changed


def _source(config: Any) -> HuggingFace:
    """Return raypipe's source of this configuration, which chooses the class."""
    source = HuggingFace(HfSpec(hf=config.model_type))
    source.config = config
    return source


def small_model(kind: str) -> nn.Module:
    """Build a small model with random values in all parameters and buffers of floats.

    Raises:
        LeftOutError: it cannot be built.
    """
    config = small_config(kind)
    transformers.set_seed(0)
    try:
        model: nn.Module = _source(config).kind(copy.deepcopy(config)).float().eval()
    except Exception as error:
        raise LeftOutError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from None
    with torch.no_grad():
        for value in {id(p): p for p in model.parameters()}.values():
            value.add_(torch.rand_like(value) * 0.01)
    return model


def compare(model: nn.Module, folder: Path) -> list[str]:
    """Save a model in a folder, and return what differs.

    Raises:
        LeftOutError: transformers itself does not read back what it saves.
    """
    saved = folder / "saved"
    try:
        model.save_pretrained(saved)  # type: ignore[operator]
        back, report = type(model).from_pretrained(  # type: ignore[attr-defined]
            saved, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise LeftOutError(f"transformers does not save or read it: {why}") from None
    if report["missing_keys"]:
        raise LeftOutError(f"transformers does not find {len(report['missing_keys'])} tensors that it saved itself")
    try:
        source = HuggingFace(HfSpec(hf=str(saved)))
    except SpecError as error:
        raise LeftOutError(str(error)) from None
    values = source.values(source.build)
    skeleton = build_without_memory(source.build)
    names, expected = [name for name, _ in skeleton.named_parameters()], dict(back.named_parameters())
    buffers = dict(skeleton.named_buffers())
    start = dict(values.read(names, tuple(buffers), 0))
    wrong = [f"start value of {name}" for name in names if not _equal(start.get(name), expected[name])]
    for name, value in back.named_buffers():
        if not _equal(start.get(name, buffers[name]), value):
            wrong.append(f"buffer {name}")
    for name, parameter in skeleton.named_parameters():
        expected[name].requires_grad_(parameter.requires_grad)  # which from_pretrained forgets
    wrong += [f"notice: {notice}" for notice in values.notices]
    return wrong or _exported(saved, expected, folder)


def _equal(mine: Tensor | None, theirs: Tensor) -> bool:
    return mine is not None and mine.shape == theirs.shape and torch.equal(
        mine.detach().to(theirs.dtype).nan_to_num(7.0), theirs.detach().nan_to_num(7.0)
    )  # fmt: skip


def _exported(saved: Path, start: dict[str, Tensor], folder: Path) -> list[str]:
    """Export a run that began with a model, in which every parameter but one has changed.

    Zeros stay, since a padding token's row is set to zero in what is read, and has no gradient; so does what never
    trains, such as sinusoidal positions.
    """
    torch.manual_seed(1)
    left = min(KEPT_OUT, len(start) - 1)
    trained = {
        name: torch.rand_like(p) * (p != 0) if p.requires_grad else p.detach()
        for n, (name, p) in enumerate(start.items())
        if n != left
    }
    run = folder / "run"
    step = run / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    commit(step, 1, [write_shard(step, "rank-00000", {f"param/{name}": p for name, p in trained.items()})], {})
    job = minimal_job({"hf": str(saved), "sequence": 16}, batch=2)
    (run / RECORD).write_text(json.dumps(job.model_dump(mode="json")))
    out = export(run, folder / "out")
    kind = HuggingFace(HfSpec(hf=str(saved))).kind
    back, report = kind.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    wanted = {**{name: p.detach() for name, p in start.items()}, **trained}
    read = dict(back.named_parameters())
    wrong = [f"exported {name}" for name, value in wanted.items() if not _equal(read.get(name), value)]
    return wrong + [f"exported, {what}: {names}" for what, names in report.items() if names]
