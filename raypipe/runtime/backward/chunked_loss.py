"""The cross-entropy of a linear head, computed chunk by chunk over tokens, so that its logits never exist whole.

The forward computes the logits of some tokens, their loss, and at once the gradient of what the head reads, and drops
the logits. The weight's gradient needs them once more: it is computed with the backward, or in W where that is split,
from logits that are computed again. These are four products instead of three, and what is kept of a micro-batch is as
wide as what the head reads, not as the vocabulary; also from B to W.

Source: Hsu et al. 2024 (Liger Kernel, arXiv:2410.10989), section 3.2, for the gradient of the input in the forward.
There the weight's gradient is computed in the forward too, and held until the backward; with several micro-batches in
flight these would be as many matrices of the vocabulary's size. ``torch.nn.functional.linear_cross_entropy`` of torch
2.13 does so too, and has neither W, nor operations between head and loss, nor shares of the rows
(docs/guides/vocabulary.md has both measured).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.models.task import Unprojected, at_least_float32, cross_entropy
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
        measure = partial(cross_entropy, classes=classes, smoothing=smoothing)
        return self._computed(labels, measure, 1)

    def row_statistics(self, labels: Tensor, classes: int, smoothing: float) -> Tensor:
        """See Unprojected."""
        measure = partial(row_statistics, classes=classes, smoothing=smoothing)
        # Of a target's logit alone, the gradient is its row of the weight, and needs no product.
        read = self._computed(labels, measure, 2, looks_up=not (smoothing or self.scaled))
        return read.view(*labels.shape, 2)

    def _computed(self, labels: Tensor, measure: Measure, numbers: int, looks_up: bool = False) -> Tensor:
        flat = replace(self, hidden=self.hidden.flatten(0, -2), waits=self.waits and self.queue.defers(self.weight))
        asked = _Asked(flat, labels.flatten(), measure, numbers, torch.is_grad_enabled(), looks_up)
        result: Tensor = _Measured.apply(flat.hidden, self.weight, self.bias, asked)  # type: ignore[no-untyped-call]
        return result


Measure = Callable[[Tensor, Tensor], Tensor]
"""From the logits of some tokens and their labels to their loss, or to what a share of the head says of each."""


def row_statistics(logits: Tensor, labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return what a share of the head's rows says of each token (``Unprojected.row_statistics``), ``[tokens, 2]``."""
    logits = at_least_float32(logits)
    rows = logits.shape[-1]
    own = (labels >= 0) & (labels < rows)
    target = logits.gather(-1, labels.clamp(0, rows - 1).unsqueeze(-1)).squeeze(-1)
    likely = (1 - smoothing) * target.where(own, 0.0)
    if smoothing:
        likely = likely + smoothing / classes * logits.sum(-1)
    return torch.stack((logits.logsumexp(-1), likely), -1)


class _Asked(NamedTuple):
    """The call of a head; autograd must not see its tensors as arguments."""

    head: ChunkedHead
    labels: Tensor
    measure: Measure
    numbers: int
    """1: their loss; 2: what a share of the head says of each token."""
    graded: bool
    """Whether a backward may follow."""
    looks_up: bool
    """Whether the gradient of the target's logit is a row of the weight."""

    def chunks(self) -> Iterator[slice]:
        """Return which tokens to compute together, in order."""
        count, tokens = len(self.labels), self.head.tokens
        return (slice(begin, begin + tokens) for begin in range(0, count, tokens))

    def of_chunk(
        self, x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, *scales: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what is measured of some tokens, and for each of ``scales`` its gradient, times that, at the head's
        product.

        The logits are gone when it returns, before those of the next tokens are made.
        """
        logits = F.linear(x, weight, bias).requires_grad_(bool(scales))
        with torch.set_grad_enabled(bool(scales)):
            made = self.measure(self.head.scale(logits), labels)
        last = len(scales) - 1
        grads = (torch.autograd.grad(made, logits, s, retain_graph=n < last)[0] for n, s in enumerate(scales))
        return made.detach(), *grads

    def read(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the input and the parameters in the dtype of the product."""
        cast = self.head.queue.cast
        used = cast(weight)
        return hidden.to(used.dtype), used, None if bias is None else cast(bias)


def _finished(ctx: Any, gx: Tensor | None, x: Tensor, used: Tensor, used_bias: Tensor | None, scale: Tensor) -> Any:
    """Return the gradients of a head's function; leave those of its parameters to W where they may wait.

    Args:
        ctx: the function's context.
        gx: the gradient of its input.
        x, used, used_bias: what it read.
        scale: the gradient of what was measured: one, or one of each token.
    """
    asked, weight, bias = ctx.asked, ctx.weight, ctx.bias

    def add(weight: Tensor, bias: Tensor | None) -> None:
        for chunk in asked.chunks():
            own = scale[chunk] if scale.dim() else scale
            _, gradient = asked.of_chunk(x[chunk], asked.labels[chunk], used, used_bias, own)
            accumulate_product(weight, bias, gradient.t(), x[chunk], gradient)
            del gradient

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


class _Measured(torch.autograd.Function):
    """Measures the logits: their loss, or two numbers of each token.

    The gradient of the input is one vector for each token and number, times the gradients of these. The forward keeps
    the vectors, so that the backward computes nothing of the vocabulary's width.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> Tensor:
        x, used, used_bias = asked.read(hidden, weight, bias)
        graded = asked.graded and ctx.needs_input_grad[0]
        count = asked.numbers - asked.looks_up if graded else 0
        backs = [torch.empty_like(x) for _ in range(count)]
        which = torch.eye(2, dtype=at_least_float32(used[:0]).dtype, device=x.device)
        measured = []
        with torch.autocast(x.device.type, enabled=False):
            for chunk in asked.chunks():
                labels = asked.labels[chunk]
                each = [None] if asked.numbers == 1 else [one.expand(len(labels), 2) for one in which]
                made, *gradients = asked.of_chunk(x[chunk], labels, used, used_bias, *each[:count])
                measured.append(made)
                for back in reversed(backs):
                    torch.mm(gradients.pop(), used, out=back[chunk])
        if asked.graded:
            ctx.save_for_backward(x, used, used_bias, *backs)
            ctx.asked, ctx.weight, ctx.bias, ctx.dtype = asked, weight, bias, hidden.dtype
        return torch.stack(measured).sum() if asked.numbers == 1 else torch.cat(measured)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = grads
        x, used, used_bias, *backs = ctx.saved_tensors
        gx = None
        if backs:
            if ctx.asked.looks_up:
                labels = ctx.asked.labels
                own = ((labels >= 0) & (labels < len(used))).unsqueeze(-1)
                backs.append(used[labels.clamp(0, len(used) - 1)].where(own, 0.0))
            scales = scale.split(1, 1) if scale.dim() else [scale]
            products = (back.to(ctx.dtype) * one for one, back in zip(scales, backs, strict=True))
            gx = reduce(add, products).to(ctx.dtype)
        return _finished(ctx, gx, x.detach(), used, used_bias, scale)
