"""What each stage sends on, known before it runs, so that receivers can post exact buffers without a handshake."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.models import LayeredModel
from raypipe.runtime.transport.channel import TensorSpec, Wire


def wires(model: LayeredModel, cut: Sequence[Sequence[int]], samples: int) -> dict[int, Wire]:
    """Per stage but the last, what it sends per micro-batch of ``samples`` and what comes back."""
    found = {}
    for stage, layers in enumerate(cut[:-1]):
        crossing = model.crossing(layers[-1], samples)
        found[stage] = Wire(
            act=tuple(TensorSpec(t.shape, t.dtype) for t in crossing),
            differentiable=tuple(t.differentiable for t in crossing),
        )
    return found
