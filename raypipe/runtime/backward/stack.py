"""Several micro-batches as one: their rows one behind the other, so that one kernel does the work of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypipe.models import CutTensor, Inputs
from raypipe.runtime.runner import Payload


def can_stack(one: Sequence[CutTensor], two: Sequence[CutTensor]) -> bool:
    """Whether what crosses a cut for two samples is what crosses it for ``one``, row behind row."""
    return all(a.shape and b.shape == (2 * a.shape[0], *a.shape[1:]) for a, b in zip(one, two, strict=True))


def stacked(payloads: Sequence[Payload]) -> Payload:
    """The micro-batches' tensors, row behind row; a single one's own."""
    return payloads[0] if len(payloads) == 1 else tuple(torch.cat(parts) for parts in zip(*payloads, strict=True))


def stacked_inputs(inputs: Sequence[Inputs]) -> Inputs:
    """The same for raw inputs."""
    if len(inputs) == 1:
        return inputs[0]
    return {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}


def unstacked(payload: Payload, count: int) -> list[Payload]:
    """Each micro-batch's rows; of a loss, which has none, each gets the sum."""
    if count == 1:
        return [payload]
    parts = [y.chunk(count) if y.dim() else (y,) * count for y in payload]
    return [tuple(own) for own in zip(*parts, strict=True)]
