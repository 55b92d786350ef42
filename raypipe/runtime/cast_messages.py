"""Messages in a narrower dtype than the arithmetic: ``parallel.wire_dtype``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypipe.job.spec import JobSpec
from raypipe.runtime.transport.channel import Direction, TensorSpec


@dataclass(frozen=True, slots=True)
class MessageCast:
    """Casts floating tensors for the way from device to device, and back on arrival.

    Tensors that are as narrow already, integers and booleans go as they are. Rounding is to nearest, in both
    directions of the pipeline.
    """

    dtype: torch.dtype
    scale: float = 1.0
    """A power of two that gradients are multiplied by on their way.

    float16 ends at 6e-8, and a gradient of a mean over a mini-batch's targets is mostly smaller; multiplied by about
    as many targets it is not (loss scaling: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, for messages
    alone).
    """

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """What a tensor is on its way."""
        return TensorSpec(spec.shape, self.dtype) if self._casts(spec.dtype) else spec

    def pack(self, direction: Direction, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As they are sent."""
        up = self.scale if direction == "grad" else 1.0
        return [(t * up if up != 1.0 else t).to(self.dtype) if self._casts(t.dtype) else t for t in tensors]

    def unpack(self, direction: Direction, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """As the stage expects them: ``specs`` are those before ``spec``."""
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


def message_cast_of(job: JobSpec) -> MessageCast | None:
    """What a job's messages go through; None where they go as they are."""
    if job.parallel.wire_dtype is None:
        return None
    dtype: torch.dtype = getattr(torch, job.parallel.wire_dtype)
    if dtype != torch.float16:
        return MessageCast(dtype)
    return MessageCast(dtype, 2.0 ** math.ceil(math.log2(job.train.batch * job.tokens_per_sample)))
