"""Autocast that casts each weight once a step instead of once a micro-batch.

``torch.autocast`` keeps the narrow copies that it makes until its outermost block ends. With a block for every forward,
each micro-batch casts all weights anew, and as its graph saves them for the backward, every micro-batch in flight holds
a copy of all weights. So a block that casts nothing is open around the whole step: the copies last until the weights
change, and all graphs save the same ones. What is computed is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import fx, nn

from raypipe.capture.opaque import flat_results
from raypipe.runtime.runner import Payload
from raypipe.runtime.stage.stage import StageModule


class Casts:
    """Autocast for the forwards of one device's stages; ``dtype`` None: no autocast."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None, stages: Iterable[StageModule]) -> None:
        self.device, self.dtype, self.stages = device.type, dtype, tuple(stages)
        # A module that runs as it is may do parts of its forward without gradients and again with them, as activation
        # checkpointing does; a copy made in the first, found in the second, would cut the weight off its gradient.
        self._lasts = dtype is not None and all(map(_written_out, self.stages))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Copies that are made inside last until ``drop``, or the end of the block."""
        self.drop()
        with torch.autocast(self.device, enabled=False) if self._lasts else nullcontext():
            yield
        self.drop()

    def forward(self) -> AbstractContextManager[object]:
        """Around each forward."""
        if self.dtype is None:
            return nullcontext()
        # What is cast without gradients must not be found by those that need them.
        keeps = torch.is_grad_enabled() or not self._lasts
        return torch.autocast(self.device, self.dtype, cache_enabled=keeps)

    def entering(self, payload: Payload) -> Payload:
        """What a forward reads of other stages.

        Autocast keeps copies of all leaves, not of weights alone. Behind a cut an activation is one; as a view of
        itself it is none, as in a model that is not cut.
        """
        if self.dtype is None or not torch.is_grad_enabled():
            return payload
        return tuple(x.view_as(x) if x.requires_grad else x for x in payload)

    def drop(self) -> None:
        """The weights change: forget their copies."""
        if self.dtype is not None:
            torch.clear_autocast_cache()
            for stage in self.stages:
                stage.queue.drop_copies()


def _written_out(stage: nn.Module) -> bool:
    """Whether every operation of a stage is known, so that no module runs as it is (``partition.opaque``)."""
    graphs = [part.graph for part in stage.modules() if isinstance(part, fx.GraphModule)]
    return not any(node.target is flat_results for graph in graphs for node in graph.nodes)
