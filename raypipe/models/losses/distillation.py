"""Distillation: a student learns what a frozen teacher beside it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.losses.preference import logits_of
from raypipe.models.task import IGNORED


def distillation(model: Any, batch: Mapping[str, Tensor], temperature: float = 2.0, alpha: float = 0.5) -> Tensor:
    """Return ``alpha`` of the teacher's loss and ``1 - alpha`` of the labels' loss, in nats.

    The teacher's is ``temperature ** 2 * KL(teacher || student)`` of both softened distributions. The teacher is
    ``model.teacher``, a frozen module whose logits have the student's shape.

    Returns:
        ``[samples]`` where there is one label a sample. For a language model ``[samples, length - 1]`` (with
        ``shift_labels`` ``[samples, length]``), 0 where the next token's label is ``IGNORED``.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2.

    Raises:
        SpecError: the model has no teacher.
    """
    teacher = getattr(model, "teacher", None)
    if teacher is None:
        raise SpecError("model.loss", "distillation needs a teacher", "give the model a frozen module named teacher")
    inputs = {name: values for name, values in batch.items() if name not in ("labels", "shift_labels")}
    student, taught = logits_of(model(**inputs)), logits_of(teacher(**inputs)).detach()
    shifted = "shift_labels" in batch
    labels = batch["shift_labels" if shifted else "labels"]
    if student.dim() == 3 and not shifted:
        student, taught, labels = student[:, :-1], taught[:, :-1], labels[:, 1:]
    if student.dtype != torch.float64:
        student, taught = student.float(), taught.float()
    soft = F.kl_div(
        (student / temperature).log_softmax(-1), (taught / temperature).log_softmax(-1), reduction="none",
        log_target=True,
    ).sum(-1)  # fmt: skip
    counts = labels != IGNORED
    hard = -student.log_softmax(-1).gather(-1, labels.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    return (alpha * temperature**2 * soft + (1 - alpha) * hard).masked_fill(~counts, 0.0)
