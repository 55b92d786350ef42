"""The papers' models as layers with their work, checked against the published numbers of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypipe.cost.gpt_work import MEGATRON, PYTORCH_2020, gpt_work
from raypipe.cost.layer_work import LayerWork, TaskWork
from raypipe.job import GptSpec


def gpt2_64() -> Sequence[LayerWork]:
    """Chimera's GPT-2 of 64 layers: sequences of 632 tokens, learned positions for 1,024 (table 4: 1,389,327,360)."""
    shape = GptSpec(
        layers=64, hidden=1280, heads=20, sequence=632, vocabulary=50257, dropout=0.1, tie_embeddings=False,
        activation="gelu-tanh",  # Hugging Face's gelu_new
    )  # fmt: skip
    first, *others = gpt_work(shape, "float32", PYTORCH_2020)
    unused = (1024 - shape.sequence) * shape.hidden  # positions that are held and summed all the same
    return (replace(first, parameters=first.parameters + unused), *others)


def bert_48() -> Sequence[LayerWork]:
    """Chimera's BERT of 48 layers: sequences of 128 tokens (table 4: 669,790,012)."""
    shape = GptSpec(layers=48, hidden=1024, heads=16, sequence=128, vocabulary=30522, dropout=0.1, tie_embeddings=False)
    h = shape.hidden
    first, *blocks, last = gpt_work(shape, "float32", PYTORCH_2020)
    # 512 positions, 2 segments and a norm before the blocks; pooler, transform and norm, a bias for each word and the
    # next-sentence classifier after them. The norm of a GPT's head is the transform's.
    first = replace(first, parameters=first.parameters + (512 - shape.sequence + 2 + 2) * h)
    extra = TaskWork(flops=2.0 * shape.sequence * h * h)
    added = 2 * (h * h + h) + shape.vocabulary + 2 * h + 2

    def more(task: TaskWork) -> TaskWork:
        return replace(task, flops=task.flops + extra.flops)

    last = replace(
        last, parameters=last.parameters + added, forward=more(last.forward), input_grad=more(last.input_grad),
        weight_grad=more(last.weight_grad),
    )  # fmt: skip
    return (first, *blocks, last)


def zeropp(layers: int, hidden: int, heads: int) -> Sequence[LayerWork]:
    """ZeroPP's GPT-style models (table 4), sequences of 1,024 tokens, in bfloat16 throughout."""
    shape = GptSpec(
        layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=50257, dropout=0.0, tie_embeddings=False
    )
    return gpt_work(shape, "bfloat16", MEGATRON)
