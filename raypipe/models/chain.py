"""A stage made of several bodies in sequence, so that some of its layers can run without the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from raypipe.graph.stages.links import between_parts
from raypipe.models.layered import Ends, LayeredModel, StageBody
from raypipe.models.running_statistics import RunningStatistics
from raypipe.models.task import Inputs


class Chain(StageBody):
    """Runs ``parts`` of a stage's layers in sequence; parameters tied between parts are shared, as in one body."""

    def __init__(
        self, model: LayeredModel, parts: Sequence[Sequence[int]], seed: int, device: torch.device | str, ends: Ends
    ) -> None:
        super().__init__()
        handed_on = [ends.arriving, *between_parts(model.results, parts, *ends), ends.leaving]
        bodies = [
            model.build_stage(part, seed, device, Ends(*around))
            for part, around in zip(parts, pairwise(handed_on), strict=True)
        ]
        self.parts = nn.ModuleList(bodies)
        self._bodies = tuple(bodies)
        named_parts = [(set(part), body.named()) for part, body in zip(parts, bodies, strict=True)]
        for group in model.tied:
            tied = [
                named[name]
                for i, name in group.parameters
                for part, named in named_parts
                if i in part and name in named
            ]
            for other in tied[1:]:
                if other is not tied[0]:
                    _replace(self, other, tied[0])
        self._statistics = tuple(one for body in bodies for one in body.statistics)
        self._named: dict[str, nn.Parameter] = {}
        known: set[int] = set()
        for body in bodies:
            for name, parameter in body.named().items():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self._named[name] = parameter

    def forward(
        self, arrived: tuple[Tensor, ...], inputs: Inputs, begin: int = 0, end: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run parts ``begin`` to ``end`` (exclusive), by default all."""
        for part in list(self.parts)[begin:end]:
            arrived = part(arrived, inputs)
        return arrived

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters as a single body would: a tied one under its owner's name."""
        return dict(self._named)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """Those of all parts."""
        return tuple(block for part in self._bodies for block in part.blocks)

    @property
    def statistics(self) -> tuple[RunningStatistics, ...]:
        """Running statistics of all parts."""
        return self._statistics


def _replace(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
