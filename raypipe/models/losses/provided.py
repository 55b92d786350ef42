"""Losses that raypipe brings: reward models and DPO (pairs of texts), distillation, and contrastive for two towers.

Both texts of a pair go through the model together, as one batch twice as large. A batch has ``chosen_input_ids`` and
``rejected_input_ids``, int64 ``[samples, length]`` of one length, and where texts are padded ``chosen_attention_mask``
and ``rejected_attention_mask`` of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.task import IGNORED, MASK, at_least_float32

Figures = dict[str, Tensor]
LossFunction = Callable[..., Tensor | tuple[Tensor, Mapping[str, Tensor]]]
"""A loss, of the model and a batch by name; it may return figures beside it (``losses.function``)."""
KINDS = ("chosen", "rejected")
REFERENCE = "reference_{}_logps"
"""Name of the log-probabilities that the frozen reference gives to the labels of a text."""


def reward(model: Any, batch: Mapping[str, Tensor], margin: float = 0.0) -> tuple[Tensor, Figures]:
    """Return ``-log sigmoid(r(chosen) - r(rejected) - margin)`` of each pair: ``[samples]``, in nats.

    The model gives each text one value r, ``[texts, 1]`` or ``[texts]``. Figures are ``accuracy``, the share of pairs
    with r(chosen) > r(rejected), and ``margin``, r(chosen) - r(rejected).

    Source: Ouyang et al. 2022 (InstructGPT), equation 1; the margin as in Touvron et al. 2023 (Llama 2), equation 2.
    """
    rewards = logits_of(model(**_both(batch)))
    chosen, rejected = _halves(at_least_float32(rewards.flatten()), batch)
    figures = {"accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
    return -F.logsigmoid(chosen - rejected - margin), figures


def dpo(
    model: Any, batch: Mapping[str, Tensor], beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Tensor, Figures]:
    """Return the loss of direct preference optimisation of each pair: ``[samples]``, in nats.

    ``chosen_labels`` and ``rejected_labels`` are the tokens themselves, with ``IGNORED`` where they do not count (the
    prompt). The reference is the batch's ``reference_chosen_logps`` and ``reference_rejected_logps``, float
    ``[samples]``, or else a frozen model beside the trained one, ``model.reference``.

    Figures have the names of TRL's ``DPOTrainer``: ``rewards/chosen`` and ``rewards/rejected``, beta times how much
    more probable, by its logarithm, the model finds a text than the reference does; ``rewards/margins``, their
    difference; ``rewards/accuracies``, the share of pairs where it is positive.

    Source: Rafailov et al. 2023, equation 7; label smoothing as in Mitchell 2023, "A note on DPO with noisy
    preferences".

    Raises:
        SpecError: there is no reference.
    """
    inputs = _both(batch)
    labels = torch.cat([batch[f"{kind}_labels"] for kind in KINDS])
    ratios = log_probability(logits_of(model(**inputs)), labels)
    if all(REFERENCE.format(kind) in batch for kind in KINDS):
        ratios = ratios - torch.cat([batch[REFERENCE.format(kind)] for kind in KINDS]).to(ratios.dtype)
    elif getattr(model, "reference", None) is not None:
        ratios = ratios - log_probability(logits_of(model.reference(**inputs)), labels).detach()
    else:
        why = "dpo needs a reference, and neither data nor model have one"
        fix = f"add arrays {REFERENCE.format(KINDS[0])} and {REFERENCE.format(KINDS[1])}, or a frozen model.reference"
        raise SpecError("model.loss", why, fix)
    chosen, rejected = _halves(ratios, batch)
    margin = beta * (chosen - rejected)
    figures = {
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "rewards/margins": margin,
        "rewards/accuracies": (margin > 0).float(),
    }
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin), figures


def log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each text's labels ``[texts, length]``, which are shifted here: ``[texts]``."""
    labels = labels[:, 1:]
    counts = labels != IGNORED
    every = at_least_float32(logits[:, :-1]).log_softmax(-1)
    own = every.gather(-1, labels.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    return own.masked_fill(~counts, 0.0).sum(-1)


def logits_of(output: Any, name: str = "logits") -> Tensor:
    """Return the logits of what a model returns: a field or a key of this name, or the one tensor."""
    if isinstance(output, Mapping):
        return output[name]  # type: ignore[no-any-return]
    return getattr(output, name, output)  # type: ignore[no-any-return]


def _both(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's arguments for the chosen texts, followed by the rejected ones."""
    names = ["input_ids", *([MASK] if f"{KINDS[0]}_{MASK}" in batch else [])]
    return {name: torch.cat([batch[f"{kind}_{name}"] for kind in KINDS]) for name in names}


def _halves(values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    samples = batch[f"{KINDS[0]}_input_ids"].shape[0]
    return values[:samples], values[samples:]


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
    student = at_least_float32(student)
    taught = taught.to(student.dtype)
    predicted, target = (student / temperature).log_softmax(-1), (taught / temperature).log_softmax(-1)
    soft = F.kl_div(predicted, target, reduction="none", log_target=True).sum(-1)
    counts = labels != IGNORED
    hard = -student.log_softmax(-1).gather(-1, labels.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    return (alpha * temperature**2 * soft + (1 - alpha) * hard).masked_fill(~counts, 0.0)


def contrastive(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross entropy of texts among images and of images among texts: a scalar, in nats.

    The model returns ``logits_per_text``, ``[texts, images]``, as a field, a key, or its one tensor; text i belongs to
    image i. The other samples of the micro-batch are the wrong answers, so the loss of a mini-batch is not that of one
    large batch, but the mean over its micro-batches, as with gradient accumulation. The figure ``accuracy`` is the
    share of texts that have the largest logit with their own image.

    Source: Radford et al. 2021 (CLIP), figure 3.
    """
    logits = at_least_float32(logits_of(model(**batch), "logits_per_text"))
    own = torch.arange(logits.shape[0], device=logits.device)
    hits = (logits.argmax(-1) == own).float().mean()
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2, {"accuracy": hits}
