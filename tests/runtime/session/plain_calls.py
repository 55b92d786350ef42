"""The same calls in one process: a PyTorch model, its optimizer, and the losses as Tinker documents them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raypipe.runtime.session.call_data import Datum
from raypipe.runtime.session.session_worker import AdamW


def logits_of(model: Any, one: Datum) -> Tensor:
    output = model(torch.tensor(one.tokens)[None])
    logits: Tensor = getattr(output, "logits", output)[0]
    return logits


def target_logprobs(model: Any, one: Datum) -> Tensor:
    return of_targets(logits_of(model, one), one)


def of_targets(logits: Tensor, one: Datum) -> Tensor:
    return logits.log_softmax(-1)[range(len(one.tokens)), torch.tensor(one.inputs["target_tokens"])]


def documented_loss(name: str, logprobs: Tensor, given: Mapping[str, Tensor], low: float, high: float) -> Tensor:
    """Written from https://tinker-docs.thinkingmachines.ai/tinker/losses, one sequence at a time."""
    if name == "cross_entropy":
        return (-logprobs * given["weights"]).sum()
    q, advantages = given["logprobs"], given["advantages"]
    ratio = torch.exp(logprobs - q)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * logprobs * advantages).sum()
    if name == "dro":
        return -(logprobs * advantages - 0.5 * 0.05 * (logprobs - q) ** 2).sum()
    if name == "gspo":
        counts = given["sequence_ratio_mask"] != 0
        log_ratio = (logprobs.detach() - q)[counts].mean()
        ratio = torch.exp(log_ratio + logprobs - logprobs.detach())
    return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()


class PlainCalls:
    """Keeps gradients from call to call, as the API does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def forward_backward(
        self, data: Sequence[Datum], loss: str, low: float = 0.8, high: float = 1.2
    ) -> tuple[float, list[Tensor]]:
        total, result = 0.0, []
        for one in data:
            logits = logits_of(self.model, one)  # once: a second backward would round float32 norms apart
            logprobs = of_targets(logits, one)
            given = {name: torch.tensor(values) for name, values in one.inputs.items()}
            if loss == "entropy":
                entropy = torch.distributions.Categorical(logits=logits).entropy()
                own = -(logprobs * given["weights"]).sum() - (entropy * given["entropy_weights"]).sum()
                logprobs = entropy
            else:
                own = documented_loss(loss, logprobs, given, low, high)
            own.backward()
            total += own.item()
            result.append(logprobs.detach())
        return total, result

    def optim_step(self, adam: AdamW) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), adam.clip or float("inf"))
        for group in self.optimizer.param_groups:
            group.update(lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)
