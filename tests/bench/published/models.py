"""The models of the published rows as work per layer: a few layers are captured, and the middle one is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from raypipe.cost.gpt_work import MEGATRON, gpt_work
from raypipe.cost.layer_work import LayerWork, TaskWork
from raypipe.job import GptSpec, job_from
from raypipe.partition.partition_job import job_pieces

LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
LLAMA_2 = {"vocab_size": 32000, "max_position_embeddings": 4096}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the rows, in Hugging Face's words; GPT-3 is the built-in GPT."""

    layers: int
    hidden: int
    heads: int
    key_values: int = 0
    inner: int = 0
    """Width of the MLP; 0: a GPT, four times the hidden one."""
    vocabulary: tuple[tuple[str, Any], ...] = ()
    lora: tuple[str, ...] = ()
    """Layers with an adapter."""
    mixture: tuple[tuple[str, Any], ...] = ()
    """Further configuration of a mixture of experts, and its family as ``hf``."""
    dense: int = 0
    """First blocks of a mixture without experts."""
    window: int = 0
    """Positions that attention of every other block reaches; 0: all."""

    @property
    def rotated(self) -> int:
        """Width of queries and keys that have positions: of DeepSeek's heads, and of their common key, a part."""
        config = dict(self.mixture)
        if "kv_lora_rank" in config:
            return (self.heads + 1) * int(config.get("qk_rope_head_dim", 64))
        return (self.heads + self.key_values) * int(config.get("head_dim", self.hidden // self.heads))


MODELS = {
    "llama3.1-8b": Model(
        layers=32, hidden=4096, heads=32, key_values=8, inner=14336, vocabulary=tuple(LLAMA_3.items())
    ),
    "llama3.1-70b": Model(
        layers=80, hidden=8192, heads=64, key_values=8, inner=28672, vocabulary=tuple(LLAMA_3.items())
    ),
    "llama3.1-405b": Model(
        layers=126, hidden=16384, heads=128, key_values=8, inner=53248, vocabulary=tuple(LLAMA_3.items())
    ),
    "llama2-13b": Model(
        layers=40, hidden=5120, heads=40, key_values=40, inner=13824, vocabulary=tuple(LLAMA_2.items())
    ),
    "llama2-70b": Model(layers=80, hidden=8192, heads=64, key_values=8, inner=28672, vocabulary=tuple(LLAMA_2.items())),
    "gpt3-5b": Model(layers=24, hidden=4096, heads=32),
    "gpt3-175b": Model(layers=96, hidden=12288, heads=96),
}
"""Meta's and OpenAI's published shapes; GPT-3's 5B, and its dropout, as in NeMo-Framework-Launcher's recipes."""
MODELS["llama-6b"] = replace(MODELS["llama3.1-8b"], layers=24)  # 6.1 without the second of its two tables
MODELS["llama3-70b"] = MODELS["llama3.1-70b"]
MODELS["llama3-70b-lora"] = replace(MODELS["llama3-70b"], lora=("all-linear",))
# NeMo's default: ``lora_tuning.target_modules: [attention_qkv]`` of dimension 32.
MODELS["llama2-70b-lora"] = replace(MODELS["llama2-70b"], lora=("q_proj", "k_proj", "v_proj"))
MODELS["qwen3-30b-a3b"] = Model(
    layers=48, hidden=2048, heads=32, key_values=4, inner=6144,
    vocabulary=(("vocab_size", 151936), ("max_position_embeddings", 40960)),
    mixture=(
        ("hf", "qwen3_moe"), ("moe_intermediate_size", 768), ("num_experts", 128), ("num_experts_per_tok", 8),
        ("head_dim", 128), ("norm_topk_prob", True),
    ),
)  # fmt: skip
MODELS["deepseek-v3"] = Model(
    layers=61, hidden=7168, heads=128, key_values=128, inner=18432, dense=3,
    vocabulary=(("vocab_size", 129280), ("max_position_embeddings", 4096)),
    mixture=(
        ("hf", "deepseek_v3"), ("moe_intermediate_size", 2048), ("n_routed_experts", 256), ("n_shared_experts", 1),
        ("num_experts_per_tok", 8), ("q_lora_rank", 1536), ("kv_lora_rank", 512),
    ),
)  # fmt: skip
# Attention of GPT-OSS as trainers run it, fused: in transformers it is a chain of operations. So it stands here as a
# Mixtral of its shapes; its experts' clamps are left out.
MODELS["gpt-oss-20b"] = Model(
    layers=24, hidden=2880, heads=64, key_values=8, inner=2880, window=128,
    vocabulary=(("vocab_size", 201088), ("max_position_embeddings", 131072)),
    mixture=(("hf", "mixtral"), ("num_local_experts", 32), ("num_experts_per_tok", 4), ("head_dim", 64)),
)  # fmt: skip
MODELS["gpt-oss-120b"] = replace(
    MODELS["gpt-oss-20b"], layers=36,
    mixture=(("hf", "mixtral"), ("num_local_experts", 128), ("num_experts_per_tok", 4), ("head_dim", 64)),
)  # fmt: skip
TILE = 128
"""Queries whose scores a kernel computes together, so all keys that any of them reaches: FlexAttention's block."""
GPT_VOCABULARY = 51200
"""Of 50257 tokens, padded so that tensor parallelism divides them."""


@lru_cache
def works(name: str, sequence: int) -> tuple[LayerWork, ...]:
    """Return the work of the embedding, of each block, and of the head."""
    model = MODELS[name]
    if not model.inner:
        shape = GptSpec(
            layers=model.layers, hidden=model.hidden, heads=model.heads, sequence=sequence, vocabulary=GPT_VOCABULARY,
            activation="gelu-tanh", dropout=0.1,
        )  # fmt: skip
        return tuple(gpt_work(shape, "bfloat16-true", MEGATRON))
    config = {
        "hidden_size": model.hidden, "num_hidden_layers": 2, "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_values, "intermediate_size": model.inner, **dict(model.vocabulary),
        **dict(model.mixture),
    }  # fmt: skip
    family = config.pop("hf", "llama")
    named = "all-linear" if model.lora == ("all-linear",) else list(model.lora)
    lora = {"r": 32, "lora_alpha": 32.0, "target_modules": named} if model.lora else None

    def pieces(**more: int) -> Sequence[LayerWork]:
        job = job_from({
            "name": name, "model": {"hf": family, "config": {**config, **more}, "sequence": sequence, "lora": lora},
            "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": 1, "dtype": "bfloat16-true"},
        })  # fmt: skip
        return [rank.work for rank in job_pieces(job).tensor_ranks]

    # Of two equal layers each is half of all that lies between embedding and head; of unequal ones it would not be.
    embedding, *inner, head = pieces(**({"first_k_dense_replace": 0} if model.dense else {}))
    block = joined(inner[len(inner) // 2 :])
    dense = block
    if model.dense:
        dense = joined((both := pieces(first_k_dense_replace=2)[1:-1])[len(both) // 2 :])
    near = windowed(block, min(sequence // 2, model.window + TILE))
    kinds = [dense if i < model.dense else near if model.window and i % 2 == 0 else block for i in range(model.layers)]
    return (embedding, *(replace(one, name=f"block.{i}") for i, one in enumerate(kinds)), head)


def windowed(work: LayerWork, keys: int) -> LayerWork:
    """Return a block whose queries reach so few keys; causal ones reach half of the positions on average."""

    def task(one: TaskWork) -> TaskWork:
        left = one.attention * (1 - 2 * keys / max(one.positions, 2 * keys))
        return replace(one, flops=one.flops - left, attention=one.attention - left, positions=min(one.positions, keys))

    return replace(work, forward=task(work.forward), input_grad=task(work.input_grad))


def added(a: TaskWork, b: TaskWork) -> TaskWork:
    """Return the work of two tasks that run one after the other."""
    fused = {
        name: sum(getattr(t, plain) if getattr(t, name) is None else getattr(t, name) for t in (a, b))
        for name, plain in (("fused_traffic", "traffic"), ("fused_overhead", "overhead"))
    }
    summed = ("flops", "operands", "weights", "traffic", "attention", "full_attention", "overhead", "quantized")
    return TaskWork(
        **{name: getattr(a, name) + getattr(b, name) for name in summed},
        **fused,
        positions=max(a.positions, b.positions),
        head=max(a.head, b.head),
        products=a.products + b.products,
    )


def joined(parts: Sequence[LayerWork]) -> LayerWork:
    """Return the work of layers that follow one another as one layer."""
    result = parts[0]
    for part in parts[1:]:
        tasks = {
            name: added(getattr(result, name), getattr(part, name)) for name in ("forward", "input_grad", "weight_grad")
        }
        largest = {
            f.name: max(getattr(result, f.name) or 0.0, getattr(part, f.name) or 0.0)
            for f in fields(LayerWork)
            if "workspace" in f.name
        }
        summed = {
            name: (getattr(result, name) or 0) + (getattr(part, name) or 0)
            for name in (
                "parameters", "trained_parameters", "kept_bytes", "fused_kept_bytes", "kept_fixed_bytes", "cast_bytes",
                "waiting_bytes", "key_value_bytes", "operand_bytes", "fused_operand_bytes",
            )
        }  # fmt: skip
        result = replace(
            result, **tasks, **largest, **summed, output_bytes=part.output_bytes, output_floats=part.output_floats
        )
    return result
