"""Losses of a call from outside: functions of each target's log-probability, and the task that applies one of them.

A caller sends sequences with a target for every position and whatever the loss needs beside; the last stage computes
the log-probability of every target, returns it, and differentiates the sum of a loss over positions. Nothing is divided
by a number of targets: the caller's weights and advantages say what each position counts.

Names, inputs and formulas are those of the Tinker API (https://tinker-docs.thinkingmachines.ai/tinker/losses), whose
``custom`` loss needs nothing more: the client differentiates its own function of the log-probabilities, and sends minus
the gradient as the weights of a cross entropy. ``entropy`` is ours: the same for functions of entropies, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.models import Inputs, Task
from raypipe.models.task import at_least_float32

TOKENS: Final = "input_ids"
TARGETS: Final = "target_tokens"
ROW: Final = "row"
"""Raw input ``[samples]``, on the host: the number of each sequence in its call."""
OWN: Final = "own"
"""Raw input ``[samples, length]``: 1 at the positions of the sequence, 0 in the padding."""

Options = Mapping[str, float]
NO_OPTIONS: Options = MappingProxyType({})
Function = Callable[[Tensor, Inputs, Options], Tensor]
"""From log-probabilities ``[samples, length]``, the raw inputs and the options to the loss of each position."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return ``-weight * log p``."""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return ``-p / q * advantage``, where ``logprobs`` of the inputs are the sampler's ``log q``."""
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return the clipped objective of every token, negative (Schulman et al. 2017, equation 7)."""
    return _clipped_objective((logprobs - inputs["logprobs"]).exp(), inputs, options)


def cispo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return ``-clip(p / q) * log p * advantage``; the clipped ratio is a constant (MiniMax 2025, equation 4)."""
    ratio = _clipped((logprobs - inputs["logprobs"]).exp(), inputs, options).detach()
    return -ratio * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return ``-(log p * advantage - beta / 2 * (log p - log q)^2)`` (Richemond et al. 2024, equation 6)."""
    apart = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * options["beta"] * apart.square())


def gspo(logprobs: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return ``ppo``'s loss with one ratio per sequence, whose gradient is each token's own (Zheng et al. 2025, 4.3).

    The ratio is the geometric mean over the positions that ``sequence_ratio_mask`` marks.
    """
    counts = (inputs["sequence_ratio_mask"] != 0) & (inputs[OWN] != 0)
    apart = (logprobs.detach() - inputs["logprobs"]).masked_fill(~counts, 0.0)
    mean = apart.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)
    return _clipped_objective((mean + logprobs - logprobs.detach()).exp(), inputs, options)


def _clipped_objective(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, options) * advantages)


def _clipped(ratio: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Clip a ratio between two thresholds: those of each position, or else those of the options."""
    low, high = (inputs.get(name, options[name]) for name in THRESHOLDS)
    return ratio.clamp(low, high)  # type: ignore[arg-type]  # both are tensors, or both numbers


LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"
THRESHOLDS: Final = (LOW, HIGH)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss that a caller can name."""

    function: Function
    needs: frozenset[str]
    """Inputs that every sequence has, beside its targets; numbers, one for each position."""
    options: Options
    """Its options, with their defaults."""
    entropy: bool = False
    """Whether entropies times ``entropy_weights`` are taken off it, and returned in the place of log-probabilities."""

    @property
    def takes(self) -> frozenset[str]:
        """All inputs that it reads: thresholds can be given for each position."""
        return self.needs | (frozenset(THRESHOLDS) if LOW in self.options else frozenset())


_SAMPLED = frozenset({"logprobs", "advantages"})
_CLIPS: Options = MappingProxyType({LOW: 0.8, HIGH: 1.2})
LOSSES: Final[Mapping[str, TokenLoss]] = MappingProxyType(
    {
        "cross_entropy": TokenLoss(cross_entropy, frozenset({"weights"}), NO_OPTIONS),
        "importance_sampling": TokenLoss(importance_sampling, _SAMPLED, NO_OPTIONS),
        "ppo": TokenLoss(ppo, _SAMPLED, _CLIPS),
        "cispo": TokenLoss(cispo, _SAMPLED, _CLIPS),
        "dro": TokenLoss(dro, _SAMPLED, MappingProxyType({"beta": 0.05})),
        "gspo": TokenLoss(gspo, _SAMPLED | {"sequence_ratio_mask"}, _CLIPS),
        "entropy": TokenLoss(cross_entropy, frozenset({"weights", "entropy_weights"}), NO_OPTIONS, entropy=True),
    }
)
"""By name in the API; ``entropy`` is not in Tinker's, and returns entropies where others return log-probabilities.
Defaults of thresholds and beta are those of Tinker's documentation and its examples."""


class CallTask(Task):
    """The losses of the calls that run now, and the log-probabilities of their targets."""

    reads = frozenset({TARGETS})

    def __init__(self) -> None:
        self.begin([("cross_entropy", NO_OPTIONS)])

    def begin(self, losses: Sequence[tuple[str, Options]]) -> None:
        """Have the losses of some calls from now on; options that are not given have their defaults."""
        self._losses = [(LOSSES[name], {**LOSSES[name].options, **options}) for name, options in losses]
        self._call = 0
        self._kept: dict[int, Tensor] = {}
        self._sums: list[dict[int, Tensor]] = [{} for _ in losses]
        """Of each call, the loss of each sequence, by its number."""

    def use(self, call: int) -> None:
        """Have the loss of a call from now on."""
        self._call = call

    def take(self) -> tuple[dict[int, Tensor], tuple[float, ...]]:
        """Return the log-probabilities ``[length]`` of each sequence since ``begin``, by its number, with padding; and
        the loss of each call."""
        kept, self._kept = self._kept, {}
        return kept, tuple(math.fsum(loss.item() for loss in sums.values()) for sums in self._sums)

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """See ``Task.loss``; ``output``: logits ``[samples, length, vocabulary]``."""
        logits, targets = at_least_float32(output), inputs[TARGETS]
        loss, options = self._losses[self._call]
        values = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        each = loss.function(values, inputs, options)
        if loss.entropy:
            values = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
            each = each - values * inputs["entropy_weights"]
        # A recomputed forward comes a second time, with the same values.
        rows = inputs[ROW].tolist()
        self._kept.update(zip(rows, values.detach(), strict=True))
        each = each.masked_fill(inputs[OWN] == 0, 0.0).sum(-1)
        self._sums[self._call].update(zip(rows, each.detach(), strict=True))
        return each.sum()

    def targets(self, inputs: Inputs) -> int:
        """Count the positions that are no padding."""
        return int(inputs[OWN].sum())
