"""The cross-entropy of a linear head, computed chunk by chunk over tokens, so that its logits never exist whole.

The forward computes the logits of some tokens, their loss, and at once the gradient of what the head reads, and drops
the logits. The weight's gradient needs them once more: it is computed with the backward, or in W where that is split,
from logits that are computed again. These are four products instead of three, and what is kept of a micro-batch is as
wide as what the head reads, not as the vocabulary; also from B to W.

Source: Hsu et al. 2024 (Liger Kernel, arXiv:2410.10989), section 3.2, for the gradient of the input in the forward.
There the weight's gradient is computed in the forward too, and held until the backward; with several micro-batches in
flight these would be as many matrices of the vocabulary's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.models.task import Unprojected, cross_entropy
from raypipe.runtime.backward.deferred import Closure, WeightQueue, accumulate_product


@dataclass(frozen=True)
class ChunkedHead(Unprojected):
    """A linear head and its input.

    Args:
        hidden: ``[..., inside]``.
        weight, bias: the head's parameters, or the version of them that the forward runs on.
        tokens: in a chunk.
        queue: of the stage.
        waits: whether weight gradients may wait for W.
        scaled: what follows the head, such as a bound of its logits; it works on every logit by itself.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tokens: int
    queue: WeightQueue
    waits: bool
    scaled: tuple[Callable[[Tensor], Tensor], ...] = ()

    def __getitem__(self, at: Any) -> ChunkedHead:
        """See Unprojected."""
        return replace(self, hidden=self.hidden[at])

    def then(self, scale: Callable[[Tensor], Tensor]) -> ChunkedHead:
        """See Unprojected."""
        return replace(self, scaled=(*self.scaled, scale))

    def logits(self) -> Tensor:
        """See Unprojected."""
        return self.scale(F.linear(self.hidden, self.weight, self.bias))

    def scale(self, logits: Tensor) -> Tensor:
        """Apply what follows the head."""
        for scale in self.scaled:
            logits = scale(logits)
        return logits

    def cross_entropy(self, labels: Tensor, classes: int | None, smoothing: float) -> Tensor:
        """See Unprojected."""
        flat = replace(self, hidden=self.hidden.flatten(0, -2), waits=self.waits and self.queue.defers(self.weight))
        asked = _Asked(flat, labels.flatten(), classes, smoothing, torch.is_grad_enabled())
        loss: Tensor = _ChunkedLoss.apply(flat.hidden, self.weight, self.bias, asked)  # type: ignore[no-untyped-call]
        return loss


class _Asked(NamedTuple):
    """The loss that is asked for; autograd must not see its tensors as arguments."""

    head: ChunkedHead
    labels: Tensor
    classes: int | None
    smoothing: float
    graded: bool
    """Whether a backward may follow."""

    def of_chunk(
        self, x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, wanted: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of some tokens, and if ``wanted`` its gradient, times ``scale``, at the head's product.

        The logits are gone when it returns, before those of the next tokens are made.
        """
        logits = F.linear(x, weight, bias).requires_grad_(wanted)
        with torch.set_grad_enabled(wanted):
            loss = cross_entropy(self.head.scale(logits), labels, self.classes, self.smoothing)
        return loss.detach(), torch.autograd.grad(loss, logits, scale)[0] if wanted else None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> Tensor:
        queue, tokens = asked.head.queue, asked.head.tokens
        used, used_bias = queue.cast(weight), None if bias is None else queue.cast(bias)
        x = hidden.to(used.dtype)
        back = torch.empty_like(x) if asked.graded and ctx.needs_input_grad[0] else None
        losses = []
        with torch.autocast(x.device.type, enabled=False):
            for begin in range(0, len(x), tokens):
                chunk = slice(begin, begin + tokens)
                read = x[chunk], asked.labels[chunk], used, used_bias
                loss, gradient = asked.of_chunk(*read, None, back is not None)
                losses.append(loss)
                if back is not None and gradient is not None:
                    torch.mm(gradient, used, out=back[chunk])
                del gradient
        if asked.graded:
            ctx.save_for_backward(x, used, used_bias, back)
            ctx.asked, ctx.weight, ctx.bias, ctx.dtype = asked, weight, bias, hidden.dtype
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = grads
        x, used, used_bias, back = ctx.saved_tensors
        asked, weight, bias, x = ctx.asked, ctx.weight, ctx.bias, x.detach()
        tokens = asked.head.tokens

        def add(weight: Tensor, bias: Tensor | None) -> None:
            for begin in range(0, len(x), tokens):
                chunk = slice(begin, begin + tokens)
                _, gradient = asked.of_chunk(x[chunk], asked.labels[chunk], used, used_bias, scale)
                assert gradient is not None
                accumulate_product(weight, bias, gradient.t(), x[chunk], gradient)
                del gradient

        gx = None if back is None else back.to(ctx.dtype) * scale
        trained = tuple(p for p in (weight, bias) if p is not None and p.requires_grad)
        if not trained:
            return gx, None, None, None
        if asked.head.waits:
            asked.head.queue.current.append(Closure(partial(add, weight, bias), trained))
            return gx, None, None, None
        leaves = [None if p is None else _leaf(p) for p in (weight, bias)]
        add(*leaves)  # type: ignore[arg-type]
        return gx, *(None if leaf is None else leaf.grad for leaf in leaves), None


def _leaf(parameter: Tensor) -> Tensor:
    """Return a leaf with a parameter's values, whose gradient has the dtype of the parameter's."""
    leaf = parameter.detach().requires_grad_(parameter.requires_grad)
    if parameter.is_leaf and getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:
        leaf.grad_dtype = parameter.grad_dtype
    return leaf
