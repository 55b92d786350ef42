"""A GPT as a list of layers: embedding, blocks, head.

Each layer takes one tensor and returns one, so that any consecutive layers can be a pipeline stage. Blocks are pre-norm
with causal attention and a GELU MLP of four times the width; positions are learned, and the head begins with a norm.

Source: Radford et al. 2019 (GPT-2): architecture and initialisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypipe.job import GptSpec
from raypipe.models.keyed_random import KeyedDropout
from raypipe.models.slices.attention import causal_attention
from raypipe.models.slices.current import current_slice

INIT_STD = 0.02
"""Standard deviation of the start values of embeddings and matrices."""


class Embedding(nn.Module):
    """Adds token and position embeddings: int64 ``[batch, sequence]`` -> ``[batch, sequence, hidden]``."""

    def __init__(self, model: GptSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.position = nn.Embedding(model.positions or model.sequence, model.hidden)
        self.dropout = KeyedDropout(model.dropout, site=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens; sequences may be shorter than the model's, or a slice of one."""
        length, run = tokens.shape[1], current_slice()
        first = 0 if run is None else run.first_position(length)
        places = torch.arange(first, first + length, device=tokens.device)
        y: Tensor = self.dropout(self.token(tokens) + self.position(places))
        return y


class Block(nn.Module):
    """Applies pre-norm attention and MLP, each with a residual: ``[batch, sequence, hidden]`` in and out."""

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
        """Run the block; there is no dropout inside attention, whose kernel would use the process's generator."""
        batch, sequence, _ = x.shape
        # The number of heads (-1) is that of this tensor rank's share.
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, -1, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = causal_attention(q, k, v)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.attention_dropout(self.attention_out(y))
        inner = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate=self.approximate)
        return x + self.mlp_dropout(self.mlp_out(inner))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Applies the last norm and projects to logits: ``[batch, sequence, hidden]`` -> ``[.., .., vocabulary]``."""

    def __init__(self, model: GptSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.project = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        y: Tensor = self.project(self.norm(x))
        return y


def make_layer(model: GptSpec, index: int) -> nn.Module:
    """Construct layer ``index`` of ``layers + 2``; its parameters do not have their start values yet."""
    if index == 0:
        return Embedding(model)
    return Block(model, index - 1) if index <= model.layers else Head(model)


def init_std(model: GptSpec, path: str) -> float | None:
    """Return the standard deviation of a parameter's start values; None for norms (ones) and biases (zeros).

    Projections onto the residual stream are scaled down by the number of additions to it, so that its variance does
    not grow with depth.
    """
    module, name = path.rsplit(".", 1)
    if name == "bias" or module.endswith("norm"):
        return None
    return INIT_STD / math.sqrt(2 * model.layers) if module in ("attention_out", "mlp_out") else INIT_STD


def forward_flops(model: GptSpec, index: int) -> float:
    """Count the floating-point operations of a layer's forward on one sequence; a multiply-add counts two.

    Only matrix products are counted, and of causal attention only the half of the scores that is not masked.
    """
    sequence, hidden = model.sequence, model.hidden
    if index == 0:
        return 0.0  # an embedding look-up moves bytes but multiplies nothing
    if index > model.layers:
        return 2.0 * sequence * hidden * model.vocabulary
    return 24.0 * sequence * hidden**2 + 2.0 * sequence**2 * hidden


# Make modules whose parameters have no values yet.
#
# ``torch.device("meta")`` alone would do it. But a module draws its start values there too, and on that device torch
# draws them, and ``to_empty`` allocates, by Python code that imports its compiler: 2 s of processor time in every
# worker.
class _NoStartValues(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


@contextmanager
def unset_parameters() -> Iterator[None]:
    """Modules that are made in this block have parameters on the meta device, and draw no values."""
    with torch.device("meta"), _NoStartValues():
        yield


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module's parameters and buffers memory on a device, without values.

    Args:
        module: its tensors are on the meta device.
        dtype: of its floating-point tensors; others keep their own.
        device: where to.
    """

    def empty(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype, device=device)

    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, nn.Parameter(empty(parameter), parameter.requires_grad))
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, empty(buffer))
