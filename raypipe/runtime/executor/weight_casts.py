"""Autocast that casts each weight once per step instead of once per micro-batch.

``torch.autocast`` caches the weights it casts until its outermost block ends. With one block per forward, each
micro-batch casts all weights again, and as its graph saves the casts for the backward, every micro-batch in flight
holds a copy of all weights. Therefore an outer, disabled autocast block is open around the whole step: the cached
casts last until the weights change, and all graphs share them. Results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import fx, nn

from raypipe.capture.opaque import flat_results
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import Payload


class Casts:
    """Autocast to ``dtype`` for the forwards of one device's stages; no autocast if ``dtype`` is None."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None, stages: Iterable[StageModule]) -> None:
        self.device, self.dtype, self.stages = device.type, dtype, tuple(stages)
        # An opaque module may run parts of its forward first without gradients and then with them, as activation
        # checkpointing does. The second run would find the casts cached by the first, which carry no gradient to the
        # weights. So casts are kept over the step only where no stage has an opaque module.
        self._cached_over_step = dtype is not None and all(map(_has_no_opaque_module, self.stages))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step: weights cast inside stay cached until ``drop``, or until the block ends."""
        self.drop()
        with torch.autocast(self.device, enabled=False) if self._cached_over_step else nullcontext():
            yield
        self.drop()

    def forward(self) -> AbstractContextManager[object]:
        """Return the context manager to surround each forward with."""
        if self.dtype is None:
            return nullcontext()
        # Do not cache casts made without gradients: a later forward that needs gradients would find them.
        keeps = torch.is_grad_enabled() or not self._cached_over_step
        return torch.autocast(self.device, self.dtype, cache_enabled=keeps)

    def entering(self, payload: Payload) -> Payload:
        """Prepare the activations that a forward receives from other stages.

        Autocast caches casts of all leaf tensors, not only of weights. A received activation is a leaf, so each is
        replaced by a view of itself, which is not, as in a model that is not cut into stages.
        """
        if self.dtype is None or not torch.is_grad_enabled():
            return payload
        return tuple(x.view_as(x) if x.requires_grad else x for x in payload)

    def drop(self) -> None:
        """Forget the cached casts; call it when the weights change."""
        if self.dtype is not None:
            torch.clear_autocast_cache()
            for stage in self.stages:
                stage.queue.drop_copies()


def _has_no_opaque_module(stage: nn.Module) -> bool:
    """Return whether a stage runs no module as one opaque operation (``capture.opaque``)."""
    graphs = [part.graph for part in stage.modules() if isinstance(part, fx.GraphModule)]
    return not any(node.target is flat_results for graph in graphs for node in graph.nodes)
