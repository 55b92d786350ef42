"""Casts: of weights under autocast, once per step, and of messages between devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from raypipe.capture.opaque import flat_results
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec, message_dtype
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import Direction, Payload, TensorSpec

# Autocast that casts each weight once per step instead of once per micro-batch.
#
# ``torch.autocast`` caches the weights it casts until its outermost block ends. With one block per forward, each
# micro-batch casts all weights again, and as its graph saves the casts for the backward, every micro-batch in flight
# holds a copy of all weights. Therefore an outer, disabled autocast block is open around the whole step: the cached
# casts last until the weights change, and all graphs share them. Results are the same bit for bit.


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
        """Forget the cached casts; call it when the weights change.

        A model has casts of its own also without autocast, such as a router in float32, and a fused optimizer changes
        parameters without a new version.
        """
        if self.dtype is not None:
            torch.clear_autocast_cache()
        for stage in self.stages:
            stage.queue.drop_copies()


def _has_no_opaque_module(stage: nn.Module) -> bool:
    """Return whether a stage runs no module as one opaque operation (``capture.opaque``)."""
    graphs = [part.graph for part in stage.modules() if isinstance(part, fx.GraphModule)]
    return not any(node.target is flat_results for graph in graphs for node in graph.nodes)


# Cast messages between devices to a smaller dtype than the arithmetic's: ``parallel.wire_dtype``.


@dataclass(frozen=True, slots=True)
class MessageCast:
    """Casts floating-point tensors to ``dtype`` before they are sent, and back on arrival.

    Integers, booleans and tensors of a dtype that is no larger than ``dtype`` are sent unchanged. Casts round to
    nearest, for activations and for gradients.
    """

    dtype: torch.dtype
    scale: float = 1.0
    """A power of two that gradients are multiplied by before the cast, and divided by after it.

    The smallest float16 is 6e-8, and gradients of a mean over a mini-batch's targets are mostly smaller. Multiplying
    by about the number of targets avoids the underflow. It is loss scaling (Micikevicius et al. 2018,
    arXiv:1710.03740, section 3.2), applied to messages only.
    """

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the shape and dtype in which a tensor is sent."""
        return TensorSpec(spec.shape, self.dtype) if self._casts(spec.dtype) else spec

    def pack(self, direction: Direction, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Scale and cast tensors to be sent."""
        up = self.scale if direction == "grad" else 1.0
        return [(t * up if up != 1.0 else t).to(self.dtype) if self._casts(t.dtype) else t for t in tensors]

    def unpack(self, direction: Direction, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Cast and scale received tensors back; ``specs`` are those that the stage expects, before any cast."""
        down = 1.0 / self.scale if direction == "grad" else 1.0
        result = []
        for tensor, spec in zip(tensors, specs, strict=True):
            if self._casts(spec.dtype):
                tensor = tensor.to(spec.dtype)
                if down != 1.0:
                    tensor.mul_(down)
            result.append(tensor)
        return result

    def _casts(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize


def message_cast_of(job: JobSpec, parallel: ParallelSpec) -> MessageCast | None:
    """Return the cast of a job's messages under a plan; None if they are sent unchanged."""
    name = message_dtype(job.train, parallel)
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    if dtype != torch.float16:
        return MessageCast(dtype)
    return MessageCast(dtype, 2.0 ** math.ceil(math.log2(job.train.batch * job.tokens_per_sample)))
