"""The whole unmodified model in a plain loop over micro-batches; what it draws at random follows the same keys.

Random calls are counted in the order in which eager PyTorch makes them, and what a call does with its uniform numbers
is written out here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.models import random_keys
from raypipe.models.keyed_operations import keyed_uniform
from raypipe.models.keyed_random import current_keys, fold64, keyed_dropout

SEED, STEP = 3, 5
RECURRENT = {torch.lstm: 2, torch.gru: 1, torch.rnn_tanh: 1, torch.rnn_relu: 1}
"""Recurrent functions of torch, and the number of their states."""


PATCHED: list[tuple[Any, tuple[str, ...]]] = [
    (F, ("dropout", "scaled_dot_product_attention", "alpha_dropout", "dropout1d", "rrelu")),
    (torch, ("rand", "rand_like", "randn", "randn_like", "normal", "bernoulli")),
    (Tensor, ("bernoulli_", "exponential_")),
    (torch._VF, ("lstm", "gru")),
]
"""Functions that draw, by the place where models find them."""


class Keyed:
    """Draws by key inside the block; the n-th call that draws is place n, whose samples are in dimension ``layout[n]``.

    The modules ``seeded`` draw from torch's generator, which each of their calls begins anew: such a call is one place.
    At the end of the block all places must have drawn.
    """

    def __init__(self, layout: Sequence[int | None], seeded: Sequence[nn.Module] = ()) -> None:
        self.layout, self.places, self.seeded = layout, count(), seeded
        self.before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        self._patch()
        for part in self.seeded:
            part.forward = self._seeded(part.forward)

    def _seeded(self, plain: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            keys = current_keys()
            assert keys is not None
            self._mend()
            with torch.random.fork_rng([]):
                torch.manual_seed(fold64(keys.samples[0], next(self.places)) >> 1)
                result = plain(*args, **kwargs)
            self._patch()
            return result

        return forward

    def _patch(self) -> None:
        for owner, names in PATCHED:
            for name in names:
                plain = getattr(owner, name)
                self.before.append((owner, name, plain))
                setattr(owner, name, self._keyed(plain, getattr(self, f"of_{name}")))

    def _mend(self) -> None:
        for owner, name, plain in self.before:
            setattr(owner, name, plain)
        self.before.clear()

    def __exit__(self, *_: Any) -> None:
        self._mend()
        for part in self.seeded:
            del part.forward
        drawn = next(self.places)
        assert drawn == len(self.layout), f"eager draws in {drawn} places, the captured model in {len(self.layout)}"

    @staticmethod
    def _keyed(plain: Any, mine: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = mine(*args, **kwargs)
            return plain(*args, **kwargs) if result is NotImplemented else result

        return called

    def uniform(self, shape: Sequence[int]) -> Tensor:
        place = next(self.places)
        return keyed_uniform(tuple(shape), place, self.layout[place])

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.erfinv(2 * self.uniform(shape) - 1) * math.sqrt(2)

    def of_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or not p:
            return NotImplemented
        # In place, torch itself multiplies by bernoulli_(1 - p), and that is what is captured.
        return input * self._kept(p, input.shape) / (1 - p) if inplace else self._drop(input, p)

    def _drop(self, x: Tensor, p: float) -> Tensor:
        place = next(self.places)
        return keyed_dropout(x, p, place, self.layout[place])

    def of_scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not dropout_p:
            return NotImplemented
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
        scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(scores).masked_fill(~attn_mask, -math.inf)
        weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
        return self._drop(weights, dropout_p) @ value

    def of_alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        return self._alpha(input, p, input.shape) if training and p else NotImplemented

    def of_dropout1d(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or not p:
            return NotImplemented
        return input * self._kept(p, (*input.shape[:2], 1)) / (1 - p)

    def _kept(self, p: float, shape: Sequence[int]) -> Tensor:
        return (self.uniform(shape) < 1 - p).to(torch.float64)

    def _alpha(self, x: Tensor, p: float, shape: Sequence[int]) -> Tensor:
        a, kept = -1.7580993408473766, self._kept(p, shape)
        scale = 1 / math.sqrt((a * a * p + 1) * (1 - p))
        return scale * (x * kept + a * (1 - kept)) - scale * a * p

    def of_bernoulli_(self, x: Tensor, p: Any = 0.5) -> Tensor:
        return x.copy_(self.uniform(x.shape) < p)

    def of_bernoulli(self, x: Tensor, p: float | None = None) -> Tensor:
        return (self.uniform(x.shape) < (x if p is None else p)).to(x.dtype)

    def of_rand(self, *size: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return self.uniform(_sizes(size)).to(dtype or torch.get_default_dtype())

    def of_rand_like(self, x: Tensor) -> Tensor:
        return self.uniform(x.shape).to(x.dtype)

    def of_randn(self, *size: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return self.normal(_sizes(size)).to(dtype or torch.get_default_dtype())

    def of_randn_like(self, x: Tensor) -> Tensor:
        return self.normal(x.shape).to(x.dtype)

    def of_normal(self, mean: Any, std: Any, size: Any = None, dtype: Any = None) -> Tensor:
        shape = (
            size if size is not None else torch.broadcast_shapes(*(v.shape for v in (mean, std) if hasattr(v, "shape")))
        )
        return (mean + std * self.normal(shape)).to(dtype or torch.float64)

    def of_exponential_(self, x: Tensor, lambd: float = 1.0) -> Tensor:
        return x.copy_(-torch.log1p(-self.uniform(x.shape)) / lambd)

    def of_rrelu(
        self, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Any:
        if not training:
            return NotImplemented
        return torch.where(input < 0, input * (lower + (upper - lower) * self.uniform(input.shape)), input)

    def _recurrent(self, function: Any, args: tuple[Any, ...]) -> Any:
        x, hidden, weights, biased, layers, p, train, both, first = args
        if not p or not train:
            return NotImplemented
        states = RECURRENT[function]
        hidden = list(hidden) if states == 2 else [hidden]
        ways = 1 + both
        each = len(weights) // layers
        places, result = next(self.places), []
        for n in range(layers):
            own = [h[n * ways : (n + 1) * ways] for h in hidden]
            mine = weights[n * each : (n + 1) * each]
            x, *left = function(x, own if states == 2 else own[0], mine, biased, 1, 0.0, train, both, first)
            result.append(left)
            if n < layers - 1:
                x = keyed_dropout(x, p, places + (n + 1) * 2**20, 0 if first else 1)
        return x, *(torch.cat(parts) for parts in zip(*result, strict=True))

    def of_lstm(self, *args: Any) -> Any:
        return self._recurrent(torch.lstm, args)

    def of_gru(self, *args: Any) -> Any:
        return self._recurrent(torch.gru, args)


def _sizes(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def loss_and_gradients(
    module: nn.Module,
    task: Any,
    fields: Mapping[str, tuple[str, Any]],
    rows: Mapping[str, Tensor],
    microbatch: int,
    layout: Sequence[int | None],
    constants: Mapping[str, Any],
    seeded: Sequence[str] = (),
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of the mini-batch and every parameter's gradient, accumulated over micro-batches.

    Args:
        module: the model, in training.
        task: whose loss is taken of what the model returns.
        fields: per argument of the model, the row that it reads.
        rows: the mini-batch.
        microbatch: samples of a micro-batch.
        layout: per place that draws, the dimension of the samples.
        constants: other arguments of the model.
        seeded: paths of modules that run as they are and draw.
    """
    parts = [module.get_submodule(path) for path in seeded]
    batch = len(next(iter(rows.values())))
    rows = {name: t.double() if t.is_floating_point() else t for name, t in rows.items()}
    total = 0.0
    targets = max(1, task.targets(rows))
    for first in range(0, batch, microbatch):
        part = {name: t[first : first + microbatch] for name, t in rows.items()}
        given = {argument: part[name] for argument, (name, _) in fields.items()}
        with random_keys(SEED, STEP, range(first, first + microbatch), training=True), Keyed(layout, parts):
            output = call(module, {**given, **constants})
        loss = task.loss(output, part) / targets
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}


def call(module: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """The output that is trained: the logits, the loss, or what the model returns first."""
    takes = inspect.signature(module.forward).parameters
    named = set(given) <= set(takes) or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    output = module(**given) if named else module(dict(given))
    if isinstance(output, Tensor):
        return output
    names = ("loss", "logits") if {"labels", "return_loss"} & set(given) else ("logits", "loss")
    for name in names:
        value = output.get(name) if hasattr(output, "get") else getattr(output, name, None)
        if value is not None:
            return value
    return next(iter(output.values() if hasattr(output, "values") else output))
