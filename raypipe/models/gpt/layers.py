"""The built-in GPT as a list of layers, each of which can be built alone.

Start values depend only on (seed, layer, parameter), so they are the same for every cut into stages. The parameter
``path`` of layer ``i`` has the name ``<i>.<path>``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from raypipe.job import GptSpec
from raypipe.models.gpt import modules as gpt
from raypipe.models.gpt.modules import allocate, unset_parameters
from raypipe.models.keyed_random import fold64
from raypipe.models.layered import BodyEnds, CutTensor, LayeredModel, StageBody, TiedGroup, equal_slices
from raypipe.models.task import ANY_LENGTH, Inputs, Lengths, NextToken
from raypipe.tensor import Division


class GptLayers(LayeredModel):
    """The layers of a GPT: embedding, blocks, head.

    Raises:
        SpecError: the model cannot be divided as ``division`` says.
    """

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
        self.flops = tuple(gpt.forward_flops(model, i) for i in range(self.count))
        self.task = NextToken()
        self.task.smoothed(smoothing)
        if division is not None:
            with unset_parameters():
                whole = nn.ModuleList(gpt.make_layer(model, i) for i in range(self.count))
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
            layer = gpt.make_layer(self.model, i)
        if self.division is not None:
            self.division.divide(layer, self.model.type, self.model, gather_logits=False, part=True)
        return layer

    def tensors(self, results: Sequence[int], samples: int, lengths: Lengths = ANY_LENGTH) -> tuple[CutTensor, ...]:
        """Return the residual stream, which keeps the parameters' dtype under autocast too."""
        sequence = lengths.get("input_ids", self.model.sequence)
        return (CutTensor((samples, sequence, self.model.hidden), self.dtype, True),) * len(results)

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
                std = gpt.init_std(self.model, path)
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

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters as ``<layer>.<path>``; a tied one under its first name."""
        found: dict[str, nn.Parameter] = {}
        for path, parameter in self.layers.named_parameters():  # yields tied parameters once
            position, _, inner = path.partition(".")
            found[f"{self.indices[int(position)]}.{inner}"] = parameter
        return found


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
