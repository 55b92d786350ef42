"""Cast messages between devices to a smaller dtype than the arithmetic's: ``parallel.wire_dtype``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec, message_dtype
from raypipe.runtime.transport.channel import Direction, TensorSpec


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
        found = []
        for tensor, spec in zip(tensors, specs, strict=True):
            if self._casts(spec.dtype):
                tensor = tensor.to(spec.dtype)
                if down != 1.0:
                    tensor.mul_(down)
            found.append(tensor)
        return found

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
