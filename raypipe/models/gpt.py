"""The built-in GPT as a list of layers (embedding, blocks, head), each of which can be built alone.

Each layer takes one tensor and returns one, so that any consecutive layers can be a pipeline stage. Blocks are pre-norm
with causal attention and a GELU MLP of four times the width; positions are learned, and the head begins with a norm.
Start values depend only on (seed, layer, parameter), so they are the same for every cut into stages. The parameter
``path`` of layer ``i`` has the name ``<i>.<path>``.

Source: Radford et al. 2019 (GPT-2): architecture and initialisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypipe.job import GptSpec
from raypipe.job.parallel_spec import check_positions
from raypipe.models.attention import causal_attention
from raypipe.models.current_slice import positions_of
from raypipe.models.keyed_random import KeyedDropout, fold64
from raypipe.models.layered import (
    BodyEnds,
    CutTensor,
    HeadRows,
    LayeredModel,
    Project,
    StageBody,
    TiedGroup,
    equal_slices,
)
from raypipe.models.task import ANY_LENGTH, Inputs, Lengths, NextToken
from raypipe.tensor import Division, Shard, scatter_sequence
from raypipe.tensor.divide import ColumnParallel, HeadParallel, RowParallel, VocabularyParallel, become

INIT_STD = 0.02
"""Standard deviation of the start values of embeddings and matrices."""


class Embedding(nn.Module):
    """Adds token and position embeddings: int64 ``[batch, sequence]`` -> ``[batch, sequence, hidden]``."""

    sequence = 1
    """Tensor ranks that divide the positions of the result."""

    def __init__(self, model: GptSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.hidden)
        self.position = nn.Embedding(model.positions or model.sequence, model.hidden)
        self.dropout = KeyedDropout(model.dropout, site=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens; sequences may be shorter than the model's, or parts of them."""
        places = positions_of(tokens.shape[1], device=tokens.device)
        position = self.position(places)
        if self.sequence > 1:
            position = scatter_sequence(position, 0, self.sequence, False)
        y: Tensor = self.dropout(self.token(tokens) + position)
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
        qkv = self.qkv(self.attention_norm(x))
        # The number of heads (-1) is that of this tensor rank's share, which has all positions.
        qkv = qkv.view(*qkv.shape[:2], 3, -1, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = causal_attention(q, k, v)
        y = y.transpose(1, 2).flatten(2)
        x = x + self.attention_dropout(self.attention_out(y))
        inner = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate=self.approximate)
        return x + self.mlp_dropout(self.mlp_out(inner))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Applies the last norm and projects to logits: ``[batch, sequence, hidden]`` -> ``[.., .., vocabulary]``."""

    def __init__(self, model: GptSpec, projects: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden)
        self.project = nn.Linear(model.hidden, model.vocabulary, bias=False) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        y: Tensor = self.project(self.norm(x))
        return y


def make_layer(model: GptSpec, index: int, projects: bool = True) -> nn.Module:
    """Construct layer ``index`` of ``layers + 2``; its parameters do not have their start values yet.

    ``projects``: the last one has the head's matrix.
    """
    if index == 0:
        return Embedding(model)
    return Block(model, index - 1) if index <= model.layers else Head(model, projects)


def divide_positions(layer: nn.Module, size: int) -> None:
    """Let ``size`` tensor ranks divide the positions between a divided layer's matrices, in place."""
    for path, module in layer.named_modules():
        if isinstance(module, Embedding | RowParallel | ColumnParallel | HeadParallel | VocabularyParallel):
            module.sequence = size
        elif isinstance(module, KeyedDropout):
            module.divided_dim = 1
        elif isinstance(module, nn.LayerNorm):
            become(module, "shared", path)


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


class GptLayers(LayeredModel):
    """The layers of a GPT: embedding, blocks, head.

    Raises:
        SpecError: the model cannot be divided as ``division`` says.
    """

    linear_head = True
    projects = True
    """Whether the last layer has the head's matrix, or ends with what that reads."""

    def __init__(
        self,
        model: GptSpec,
        dtype: torch.dtype = torch.float32,
        division: Division | None = None,
        smoothing: float = 0.0,
    ) -> None:
        self.model, self.dtype, self.division = model, dtype, division
        self.names = ("embedding", *(f"block.{i}" for i in range(model.layers)), "head")
        head = self.count - 1
        tied = TiedGroup("0.token.weight", ((0, "0.token.weight"), (head, f"{head}.project.weight")))
        self.tied = (tied,) if model.tie_embeddings else ()
        self.flops = tuple(forward_flops(model, i) for i in range(self.count))
        self.task = NextToken()
        self.task.smoothed(smoothing)
        if division is not None:
            if division.sequence:
                check_positions([model.sequence], division.size)
            with unset_parameters():
                whole = nn.ModuleList(make_layer(model, i) for i in range(self.count))
            self.shards = division.divide(whole, model.type, model, gather_logits=False)
            self.task.classes = model.vocabulary

    @property
    def units(self) -> tuple[range, ...]:
        """One unit per block; the embedding is in the first block's unit, the head in the last's."""
        last = self.model.layers
        return tuple(range(i - (i == 1), i + 1 + (i == last)) for i in range(1, last + 1))

    def parameters(self, i: int) -> int:
        """Count the elements of layer ``i``'s parameters; tied ones count in each holder."""
        return sum(p.numel() for p in self._empty(i).parameters())

    def parameter_names(self, i: int) -> Collection[str]:
        """See ``LayeredModel.parameter_names``."""
        return [f"{i}.{path}" for path, _ in self._empty(i).named_parameters()]

    def _empty(self, i: int) -> nn.Module:
        """Construct layer ``i`` on the meta device."""
        with unset_parameters():
            layer = make_layer(self.model, i, self.projects)
        if self.division is not None:
            self.division.divide(layer, self.model.type, self.model, gather_logits=False, part=True)
            if self.division.sequence:
                divide_positions(layer, self.division.size)
        return layer

    def tensors(self, results: Sequence[int], samples: int, lengths: Lengths = ANY_LENGTH) -> tuple[CutTensor, ...]:
        """Return the residual stream, which keeps the parameters' dtype under autocast too."""
        sequence = lengths.get("input_ids", self.model.sequence)
        if self.division is not None and self.division.sequence:
            sequence //= self.division.size
        return (CutTensor((samples, sequence, self.model.hidden), self.dtype, True),) * len(results)

    @property
    def head(self) -> HeadRows:
        """See ``LayeredModel.head``."""
        return HeadRows((f"{self.count - 1}.project.weight",), self.model.vocabulary, self.model.hidden)

    def without_head(self) -> GptLayers:
        """See ``LayeredModel.without_head``."""
        other = copy(self)
        other.projects, other.linear_head, other.tied = False, False, ()
        other.flops = (*self.flops[:-1], 0.0)
        return other

    def read_by_head(self, samples: int, lengths: Lengths = ANY_LENGTH) -> CutTensor:
        """See ``LayeredModel.read_by_head``."""
        return self.tensors((0,), samples, lengths)[0]

    def build_head(self, shard: Shard, seed: int, device: torch.device | str = "cpu") -> StageBody:
        """See ``LayeredModel.build_head``."""
        layer: Any = self.build(self.count - 1, seed)
        layer.norm = nn.Identity()
        layer.project.weight = nn.Parameter(shard.cut(layer.project.weight.detach(), 0).to(device))
        return GptStage({self.count - 1: layer})

    def slice_lengths(self, slices: int) -> Lengths:
        """See ``LayeredModel.slice_lengths``; all but attention and positions is computed per token."""
        length = equal_slices(self.model.sequence, slices)
        return dict.fromkeys(("input_ids", *self.task.reads), length)

    @property
    def positions(self) -> int:
        """Tokens of a sample."""
        return self.model.sequence

    def reads(self, layers: Sequence[int]) -> frozenset[str]:
        """Return ``input_ids`` if the embedding is among these layers."""
        return frozenset({"input_ids"} if 0 in layers else ())

    def build(self, i: int, seed: int, device: torch.device | str = "cpu") -> nn.Module:
        """Build layer ``i`` with its start values.

        Values are drawn in float32 on the CPU and then cast, so that they are the same for every dtype and device.
        """
        layer = self._empty(i)
        allocate(layer, self.dtype, device)
        with torch.no_grad():
            for path, parameter in layer.named_parameters():
                std = init_std(self.model, path)
                if std is None:
                    parameter.fill_(0.0 if path.endswith("bias") else 1.0)
                    continue
                owner, _, owner_path = self.owner(f"{i}.{path}").partition(".")
                generator = torch.Generator().manual_seed(_parameter_seed(seed, int(owner), owner_path))
                shard = self.shards.get(f"{i}.{path}")
                shape = parameter.shape if shard is None else shard.whole_shape(parameter.shape)
                value = torch.randn(shape, generator=generator).mul_(std)
                parameter.copy_(value if self.division is None else self.division.cut(shard, value))
        return layer

    def owner(self, name: str) -> str:
        """Return the name of a parameter's owner: its own name, unless it is tied to an earlier parameter."""
        for group in self.tied:
            if name in (tied_name for _, tied_name in group.parameters):
                return group.name
        return name

    def build_stage(
        self, layers: Sequence[int], seed: int, device: torch.device | str = "cpu", ends: BodyEnds | None = None
    ) -> StageBody:
        """Build these layers as one stage; they are consecutive, for a GPT has no branches."""
        built = {i: self.build(i, seed, device) for i in layers}
        join_tied(self, built)
        return GptStage(built)


class GptStage(StageBody):
    """The stage body of consecutive layers of a GPT."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.indices = tuple(layers)
        self.layers = nn.ModuleList(layers.values())

    def forward(self, arrived: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """Run the layers on the one tensor that arrived, or on the tokens in the first stage."""
        (x,) = arrived or (inputs["input_ids"],)
        for layer in self.layers:
            x = layer(x)
        return (x,)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The layers."""
        return tuple(self.layers)

    def leave_head_to(self, project: Project) -> None:
        """See ``StageBody.leave_head_to``."""
        linear: Any = self.layers[-1].get_submodule("project")
        enter = linear.enter if isinstance(linear, HeadParallel) else nn.Identity()
        linear.forward = lambda x: project(enter(x), linear.weight, linear.bias)

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters as ``<layer>.<path>``; a tied one under its first name."""
        result: dict[str, nn.Parameter] = {}
        for path, parameter in self.layers.named_parameters():  # yields tied parameters once
            position, _, inner = path.partition(".")
            result[f"{self.indices[int(position)]}.{inner}"] = parameter
        return result


def join_tied(model: GptLayers, layers: Mapping[int, nn.Module]) -> None:
    """Make each group of tied parameters in these layers (e.g. those of one stage) one Parameter, in place."""
    for group in model.tied:
        holders = [(layers[i], name.partition(".")[2]) for i, name in group.parameters if i in layers]
        for layer, path in holders[1:]:
            parent, _, leaf = path.rpartition(".")
            setattr(layer.get_submodule(parent), leaf, holders[0][0].get_parameter(holders[0][1]))


def _parameter_seed(seed: int, layer: int, path: str) -> int:
    """Derive a generator's seed (63 bits) from the run's seed and a parameter's name."""
    return fold64(seed, layer, int.from_bytes(path.encode(), "little") % (1 << 64), len(path)) >> 1
