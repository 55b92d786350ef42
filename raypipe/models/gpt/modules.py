"""A GPT as a list of layers: embedding, blocks, head.

Each layer takes one tensor and returns one, so that any run of layers is a pipeline stage. Pre-norm blocks with
causal attention and a GELU MLP of four times the width, learned positions, a last norm in the head.

Source: Radford et al. 2019 (GPT-2): architecture and initialisation.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.job import GptSpec
from raypipe.models.keyed_random import KeyedDropout

INIT_STD = 0.02
"""Standard deviation of embeddings and matrices at the start."""


class Embedding(nn.Module):
    """Token plus position: int64 ``[batch, sequence]`` -> ``[batch, sequence, hidden]``."""

    def __init__(self, model: GptSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.position = nn.Embedding(model.positions or model.sequence, model.hidden)
        self.dropout = KeyedDropout(model.dropout, site=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Sequences may be shorter than the model's."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        y: Tensor = self.dropout(self.token(tokens) + self.position(places))
        return y


class Block(nn.Module):
    """Attention and MLP, each on the normed stream and added to it: ``[batch, sequence, hidden]`` in and out."""

    def __init__(self, model: GptSpec, index: int) -> None:
        super().__init__()
        hidden = model.hidden
        self.head_width = hidden // model.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_dropout = KeyedDropout(model.dropout, site=1 + 2 * index)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)
        self.mlp_dropout = KeyedDropout(model.dropout, site=2 + 2 * index)
        self.approximate = "tanh" if model.activation == "gelu-tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        """No dropout inside attention: its kernel would draw from a generator that knows the process."""
        batch, sequence, _ = x.shape
        # As many heads as there are: a member of a tensor group has some of them.
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, -1, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.attention_dropout(self.attention_out(y))
        inner = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate=self.approximate)
        return x + self.mlp_dropout(self.mlp_out(inner))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Last norm and projection to logits: ``[batch, sequence, hidden]`` -> ``[batch, sequence, vocabulary]``."""

    def __init__(self, model: GptSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.project = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, not probabilities."""
        y: Tensor = self.project(self.norm(x))
        return y


def make_layer(model: GptSpec, index: int) -> nn.Module:
    """Layer ``index`` of ``layers + 2``, its parameters not yet filled in."""
    if index == 0:
        return Embedding(model)
    return Block(model, index - 1) if index <= model.layers else Head(model)


def init_std(model: GptSpec, path: str) -> float | None:
    """Standard deviation of a parameter's start values; None for norms and biases, which start at one and zero.

    Projections that write to the residual stream are scaled by the number of their additions, so that the stream's
    variance does not grow with depth.
    """
    module, name = path.rsplit(".", 1)
    if name == "bias" or module.endswith("norm"):
        return None
    return INIT_STD / math.sqrt(2 * model.layers) if module in ("attention_out", "mlp_out") else INIT_STD


def forward_flops(model: GptSpec, index: int) -> float:
    """Floating-point operations of a layer's forward on one sequence; a multiply-add counts two.

    Matrix products only; causal attention counts the half of the scores that is not masked.
    """
    sequence, hidden = model.sequence, model.hidden
    if index == 0:
        return 0.0  # a lookup: bytes moved, nothing multiplied
    if index > model.layers:
        return 2.0 * sequence * hidden * model.vocabulary
    return 24.0 * sequence * hidden**2 + 2.0 * sequence**2 * hidden
