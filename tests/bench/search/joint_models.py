"""Models as AdaPtis has them (arXiv 2509.23722): layers of several kinds, and heads of large vocabularies.

Times are FLOPs over the rate that a device reaches with that kind of layer; a backward takes twice its forward, one
half for each gradient. A sequence of 4,096 tokens is a micro-batch. Bytes: bfloat16 activations, 16 bytes a parameter.
"""

from __future__ import annotations

from typing import NamedTuple

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes

TOKENS = 4096
RATE = 2.0e14
"""FLOPs a second of large products, of an A100's 312 x 10^12."""


class LayerKind(NamedTuple):
    flops: float
    """Of a token's forward."""
    parameters: float
    kept: float
    """Values of activations a token."""
    share: float = 1.0
    """Of the rate that it reaches."""


def gpt(layers: int = 32, hidden: int = 4096, vocabulary: int = 50_304) -> list[tuple[str, LayerKind]]:
    """Blocks all alike, a head of less than a block."""
    block = LayerKind(24 * hidden**2 + 2 * TOKENS * hidden, 12 * hidden**2, 34 * hidden / 2)
    return [("embedding", _embedding(hidden, vocabulary)), *[("block", block)] * layers, _head(hidden, vocabulary)]


def gemma(layers: int = 26, hidden: int = 2304, wide: int = 9216, vocabulary: int = 256_000):
    """A head that takes as long as six blocks."""
    parameters = 3 * hidden * wide + 3.2 * hidden**2
    block = LayerKind(2 * parameters + 2 * TOKENS * hidden, parameters, 14 * hidden + 3 * wide)
    return [("embedding", _embedding(hidden, vocabulary)), *[("block", block)] * layers, _head(hidden, vocabulary)]


def deepseek(layers: int = 27, hidden: int = 2048, vocabulary: int = 102_400):
    """A dense layer, then mixtures of experts: six of 64 of 1,408 for a token and two for all, in smaller products."""
    attention = 4 * hidden**2
    dense = LayerKind(
        2 * (attention + 3 * hidden * 10_944) + 2 * TOKENS * hidden, attention + 3 * hidden * 10_944, 60e3
    )
    active = attention + 3 * hidden * 1408 * 8
    experts = LayerKind(2 * active + 2 * TOKENS * hidden, attention + 3 * hidden * 1408 * 66 / 8, 60e3, 0.55)
    blocks = [("dense", dense), *[("experts", experts)] * (layers - 1)]
    return [("embedding", _embedding(hidden, vocabulary)), *blocks, _head(hidden, vocabulary)]


def nemotron(layers: int = 52, hidden: int = 4096, wide: int = 21_504, vocabulary: int = 131_072):
    """Mamba and feed-forward layers by turns, every thirteenth pair with attention in place of Mamba."""
    mamba = LayerKind(2 * 6.2 * hidden**2, 6.2 * hidden**2, 12 * hidden, 0.5)
    attention = LayerKind(2 * 2.5 * hidden**2 + 2 * TOKENS * hidden, 2.5 * hidden**2, 6 * hidden, 0.8)
    feed = LayerKind(4 * hidden * wide, 2 * hidden * wide, hidden + 2 * wide)
    mix = [("feed-forward", feed) if k % 2 else ("attention", attention) if k % 14 == 8 else ("mamba", mamba)
           for k in range(layers)]  # fmt: skip
    return [("embedding", _embedding(hidden, vocabulary)), *mix, _head(hidden, vocabulary)]


MODELS = {"GPT": gpt, "Gemma-like": gemma, "DeepSeek-like": deepseek, "Nemotron-H-like": nemotron}


def profile_of(layers: list[tuple[str, LayerKind]], devices: int, hidden: int = 4096) -> Profile:
    """On devices of one host, with as much memory as anyone could want."""
    link = LinkFit(alpha_s=2e-5, beta_s_per_byte=1 / 2e10)
    return Profile(
        source="analytic", device="made up", dtype="float32", devices=devices, devices_per_host=devices,
        memory_bytes=1e15, layers=tuple(_layer(f"{name}.{i}", kind, hidden) for i, (name, kind) in enumerate(layers)),
        update_s_per_parameter=0.0, inside=link, between=link,
    )  # fmt: skip


def _layer(name: str, kind: LayerKind, hidden: int) -> LayerProfile:
    time = kind.flops * TOKENS / RATE / kind.share
    times = TaskTimes(forward=time, input_grad=time, weight_grad=time, joint=2 * time, recompute=time)
    return LayerProfile(
        name=name, parameters=int(kind.parameters), times={1: times}, kept_bytes=2.0 * kind.kept * TOKENS,
        waiting_bytes=2.0 * kind.kept * TOKENS, output_bytes=2.0 * hidden * TOKENS,
    )  # fmt: skip


def _embedding(hidden: int, vocabulary: int) -> LayerKind:
    return LayerKind(8.0 * hidden, hidden * vocabulary, hidden, 0.01)


def _head(hidden: int, vocabulary: int) -> tuple[str, LayerKind]:
    return "head", LayerKind(2 * hidden * vocabulary, hidden * vocabulary, vocabulary)
