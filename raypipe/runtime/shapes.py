"""What each stage sends on, known before it runs, so that receivers can post exact buffers without a handshake."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypipe.models import LayerPlan
from raypipe.runtime.transport.channel import TensorSpec


def wire_specs(
    plan: LayerPlan, cut: Sequence[Sequence[int]], samples: int, dtype: torch.dtype
) -> dict[int, tuple[TensorSpec, ...]]:
    """Per stage but the last, shape and dtype of what it sends per micro-batch of ``samples`` sequences.

    ``dtype`` is the weights': the residual stream keeps it under autocast too.
    """
    return {
        stage: (TensorSpec(plan.output_shape(layers[-1], samples), dtype),) for stage, layers in enumerate(cut[:-1])
    }
