"""The contrastive loss of two towers, such as CLIP's: each text belongs to one image of its micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def contrastive(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross entropy of texts among images and of images among texts: a scalar, in nats.

    The model returns ``logits_per_text``, ``[texts, images]``, as a field, a key, or its one tensor; text i belongs to
    image i. The other samples of the micro-batch are the wrong answers, so the loss of a mini-batch is not that of one
    large batch, but the mean over its micro-batches, as with gradient accumulation. The figure ``accuracy`` is the
    share of texts that have the largest logit with their own image.

    Source: Radford et al. 2021 (CLIP), figure 3.
    """
    output = model(**batch)
    found = output.get("logits_per_text") if isinstance(output, Mapping) else None
    logits: Tensor = getattr(output, "logits_per_text", output) if found is None else found
    if logits.dtype != torch.float64:
        logits = logits.float()
    own = torch.arange(logits.shape[0], device=logits.device)
    hits = (logits.argmax(-1) == own).float().mean()
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2, {"accuracy": hits}
