"""Losses that raypipe brings: reward models and DPO (pairs of texts), distillation, and contrastive for two towers.

Both texts of a pair go through the model together, as one batch twice as large. A batch has ``chosen_input_ids`` and
``rejected_input_ids``, int64 ``[samples, length]`` of one length, and where texts are padded ``chosen_attention_mask``
and ``rejected_attention_mask`` of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.task import IGNORED, MASK, Field, Inputs, Task, at_least_float32

Figures = dict[str, Tensor]
LossFunction = Callable[..., Tensor | tuple[Tensor, Mapping[str, Tensor]]]
"""A loss, of the model and a batch by name; it may return figures beside it (``loss_function``)."""
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


# Tasks of models whose forward returns the loss: their own, or that of a function at its end.


LOSS = "loss"
"""Name of the loss among a model's outputs."""


class OwnLoss(Task):
    """The data of another task ``of``, with the scalar loss that the model returns.

    Such a loss belongs to a whole micro-batch: it is a mean over its targets, or has terms that are not sums over
    samples (such as the load balance of experts). A mini-batch's loss is therefore the mean over its equally large
    micro-batches, which ``(model(**micro_batch).loss / count).backward()`` accumulates.
    """

    of_microbatch = True
    predicts = False
    unit = "as the model computes it"

    def __init__(self, of: Task, fields: Collection[str]) -> None:
        self.of, self.masks = of, of.masks
        self.counted = "labels" if "labels" in fields else min(fields, default="labels")
        self.reads = frozenset({self.counted})

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the model's loss times the number of samples, since the runtime divides by all samples."""
        loss = output[..., 0] if self.figures else output
        return loss * len(inputs[self.counted])

    def sums_of_figures(self, output: Tensor, inputs: Inputs) -> Tensor:
        """See Task.sums_of_figures; a figure is of the micro-batch, as the loss is."""
        return output[..., 1:] * len(inputs[self.counted])

    def targets(self, inputs: Inputs) -> int:
        """Count the samples."""
        return len(inputs[self.counted])

    def window(self, sequence: int) -> int:
        """See Task.window."""
        return self.of.window(sequence)

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """See Task.from_text; ``shift_labels`` become unshifted ``labels``, because such models shift them."""
        made = self.of.from_text(rows, keys)
        if made.pop("shift_labels", None) is not None:
            made["labels"] = made["input_ids"]
        return made

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Task.complete."""
        return self.of.complete(inputs)

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """See Task.complete_lengths."""
        return self.of.complete_lengths(lengths)


LABELS = ("labels", "shift_labels")


class GivenLoss(OwnLoss):
    """The data of another task ``of``, with losses ``[samples, ...]`` that are added up.

    With one loss a sample, a mini-batch's loss is the mean over its samples. With one loss a label, it is the mean over
    the labels that are not ``IGNORED``, as in PyTorch; there may be one loss less than labels, where the first label
    has no prediction. Neither depends on how a mini-batch falls into micro-batches.
    """

    of_microbatch = False
    unit = "as the function computes it"

    def __init__(self, of: Task, fields: Collection[str]) -> None:
        super().__init__(of, fields)
        self.per_label, self.shifted = False, False

    def fit(self, two: tuple[int, ...], three: tuple[int, ...], fields: Mapping[str, Field]) -> None:
        """Learn what losses there are from their shapes for two and for three samples.

        Raises:
            SpecError: there is neither one a sample nor one a label.
        """
        labels = next((name for name in LABELS if name in fields), None)
        shape = fields[labels].shape if labels is not None else None
        if two[:1] == (2,) and three[:1] == (3,) and two[1:] == three[1:]:
            if two[1:] == ():
                return
            one_less = shape is not None and len(shape) == 1 and two[1:] == (shape[0] - 1,)
            if labels is not None and (two[1:] == shape or one_less):
                self.per_label, self.shifted, self.counted = True, one_less, labels
                self.reads = frozenset({labels})
                return
        why = f"the function returns shape {list(two)} for 2 samples and {list(three)} for 3"
        fix = "return one loss a sample, or one a label, as with reduction='none'; or set model.loss_per: microbatch"
        raise SpecError("model.loss", why, fix)

    def _counts(self, inputs: Inputs) -> Tensor:
        labels = inputs[self.counted]
        return (labels[:, 1:] if self.shifted else labels) != IGNORED

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the sum of the losses that count, in float32 or (for float64 losses) float64."""
        return self._sum(output[..., 0] if self.figures else output, inputs)

    def sums_of_figures(self, output: Tensor, inputs: Inputs) -> Tensor:
        """See Task.sums_of_figures; they count where the losses do."""
        return torch.stack([self._sum(figure, inputs) for figure in output[..., 1:].unbind(-1)])

    def _sum(self, values: Tensor, inputs: Inputs) -> Tensor:
        values = at_least_float32(values)
        return values.masked_fill(~self._counts(inputs), 0.0).sum() if self.per_label else values.sum()

    def targets(self, inputs: Inputs) -> int:
        """Count these losses."""
        return int(self._counts(inputs).sum()) if self.per_label else len(inputs[self.counted])

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """See Task.from_text."""
        return self.of.from_text(rows, keys)
