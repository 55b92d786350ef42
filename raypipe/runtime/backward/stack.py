"""Stack several micro-batches along the batch dimension, so that one kernel does the work of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypipe.models import CutTensor, Inputs
from raypipe.runtime.transport.channel import Payload


def can_stack(one: Sequence[CutTensor], two: Sequence[CutTensor]) -> bool:
    """Return whether the tensors that cross a cut scale with the batch: for ``two`` samples, dimension 0 doubles."""
    return all(a.shape and b.shape == (2 * a.shape[0], *a.shape[1:]) for a, b in zip(one, two, strict=True))


def stacked(payloads: Sequence[Payload]) -> Payload:
    """Concatenate the micro-batches' tensors along dimension 0."""
    return payloads[0] if len(payloads) == 1 else tuple(torch.cat(parts) for parts in zip(*payloads, strict=True))


def stacked_inputs(inputs: Sequence[Inputs]) -> Inputs:
    """Concatenate the micro-batches' raw inputs along dimension 0."""
    if len(inputs) == 1:
        return inputs[0]
    return {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}


def unstacked(payload: Payload, count: int) -> list[Payload]:
    """Split stacked tensors into each micro-batch's rows; a scalar (a loss sum) is repeated for each."""
    if count == 1:
        return [payload]
    parts = [y.chunk(count) if y.dim() else (y,) * count for y in payload]
    return [tuple(rows) for rows in zip(*parts, strict=True)]
