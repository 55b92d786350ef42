"""A model as a numbered list of layers, each of which can be built alone and always starts the same.

A stage builds only its own layers. Start values follow from (seed, layer, parameter) alone, so the cut of a model
into stages never changes where training starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from raypipe.job import ModelSpec
from raypipe.models import gpt
from raypipe.models.keyed_random import fold64


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """Parameters that are one: the same start, their gradients summed, the same update."""

    name: str
    """What checkpoints call it: its first member's ``<layer>.<path>``."""
    members: tuple[tuple[int, str], ...]
    """(layer, parameter path) of each holder, the owner first."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The layers of a model: names, costs, and how to build each."""

    model: ModelSpec
    names: tuple[str, ...]
    """``embedding``, ``block.0``, ..., ``head``."""
    tied: tuple[TiedGroup, ...]
    flops: tuple[float, ...]
    """Forward floating-point operations of each layer on one sequence (analytic)."""

    @property
    def count(self) -> int:
        """Number of layers, embedding and head included."""
        return len(self.names)

    def build(
        self, i: int, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """Layer ``i`` with its start values; nothing is drawn from torch's global generators.

        Values are drawn in float32 on the CPU and then converted, so every dtype and device starts alike.
        """
        with torch.device("meta"):
            layer = gpt.make_layer(self.model, i)
        layer = layer.to(dtype).to_empty(device=device)
        with torch.no_grad():
            for path, parameter in layer.named_parameters():
                std = gpt.init_std(self.model, path)
                if std is None:
                    parameter.fill_(0.0 if path.endswith("bias") else 1.0)
                    continue
                owner, owner_path = self.owner(i, path)
                generator = torch.Generator().manual_seed(_parameter_seed(seed, owner, owner_path))
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(std))
        return layer

    def owner(self, i: int, path: str) -> tuple[int, str]:
        """The first holder of a parameter: itself, unless it is tied to an earlier one."""
        for group in self.tied:
            if (i, path) in group.members:
                return group.members[0]
        return i, path

    def output_shape(self, i: int, batch: int) -> tuple[int, ...]:
        """Shape of what layer ``i`` returns for ``batch`` full sequences."""
        width = self.model.vocabulary if i == self.count - 1 else self.model.hidden
        return batch, self.model.sequence, width

    def parameters(self, i: int) -> int:
        """Number of values in layer ``i``'s parameters, tied ones counted in each holder."""
        return sum(torch.Size(shape).numel() for shape in gpt.parameter_shapes(self.model, i).values())


def build_layers(model: ModelSpec) -> LayerPlan:
    """The layers of a job's model."""
    names = ("embedding", *(f"block.{i}" for i in range(model.layers)), "head")
    head = len(names) - 1
    tied = (TiedGroup("0.token.weight", ((0, "token.weight"), (head, "project.weight"))),)
    flops = tuple(gpt.forward_flops(model, i) for i in range(len(names)))
    return LayerPlan(model, names, tied if model.tie_embeddings else (), flops)


def join_tied(plan: LayerPlan, layers: Mapping[int, nn.Module]) -> None:
    """Make the members of each tied group one Parameter among these layers (those of one stage, say), in place."""
    for group in plan.tied:
        here = [(layers[i], path) for i, path in group.members if i in layers]
        for layer, path in here[1:]:
            parent, _, name = path.rpartition(".")
            setattr(layer.get_submodule(parent), name, here[0][0].get_parameter(here[0][1]))


def _parameter_seed(seed: int, layer: int, path: str) -> int:
    """A generator's seed (63 bits) from the run's seed and a parameter's place."""
    return fold64(seed, layer, int.from_bytes(path.encode(), "little") % (1 << 64), len(path)) >> 1
