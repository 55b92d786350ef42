"""Experts divided over data-parallel copies: a copy holds some experts of each layer, and computes all their tokens.

The experts of a layer are one module with stacked parameters, ``[experts, ...]``, that is called with tokens, the
numbers of their experts and the weights of these, as transformers builds them for every family. A divided module sends
each token to the copies that hold its experts (an all-to-all of as many rows as there are: no token is dropped, and
none is padded), calls its own class's forward there, and adds up what comes back.

Source: Lepikhin et al. 2021, "GShard", section 3.2 (dispatch and combine); Rajbhandari et al. 2022, "DeepSpeed-MoE",
section 5 (expert parallelism inside data parallelism).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.job.parallel_spec import check_expert_order
from raypipe.tensor.group import Shard, current_group, start_exchange
from raypipe.tensor.traced_experts import HeldExperts, is_traced, traced

EXPERTS = "experts"
"""The kind of division, among those of feature tables."""
KEY = "parallel.experts"


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a layer's experts: stacked parameters, and ``forward(tokens, numbers, weights)``."""
    count = getattr(module, "num_experts", None)
    parameters = [p for p in module._parameters.values() if p is not None]
    stacked = [p.dim() >= 2 and p.shape[0] == count for p in parameters]
    if not isinstance(count, int) or not stacked or not all(stacked) or not any(p.dim() == 3 for p in parameters):
        return False
    given = [
        p.name
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(given) == 4 and ("ind" in given[2] or "experts" in given[2]) and "weights" in given[3]


def experts_of(model: nn.Module, size: int, copies: int = 0) -> dict[str, nn.Module]:
    """Return the experts modules of a model by path, once each divides evenly over ``size`` copies.

    ``copies``: how many copies there are, a multiple of ``size``; 0: not known yet.

    Raises:
        SpecError: there are none, one does not, or a module of experts has another interface.
    """
    result = {path: module for path, module in model.named_modules() if is_experts(module)}
    for path, module in model.named_modules():
        inside = any(path == known or path.startswith(f"{known}.") for known in result)
        if "Experts" in type(module).__name__ and not inside and next(module.parameters(), None) is not None:
            why = f"{path} is a {type(module).__name__}, whose experts cannot be divided: they are no stacked "
            why += "parameters with forward(hidden_states, top_k_index, top_k_weights)"
            raise SpecError(KEY, why, "use experts: 1, which trains it")
    if not result:
        raise SpecError(KEY, f"{type(model).__name__} has no module of experts", "use experts: 1")
    counts: dict[str, int] = {path: module.num_experts for path, module in result.items()}
    for path, count in counts.items():
        if count % size:
            why = f"the {count} experts of {path} do not divide over {size} copies"
            common = gcd(copies, *counts.values())
            fits = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: (abs(n - size), n))
            raise SpecError(KEY, why, f"use experts: {fits}" + ("" if copies else ", of which replicas is a multiple"))
    return result


def in_order(shards: Mapping[str, Shard], orders: Sequence[tuple[int, ...]]) -> dict[str, Shard]:
    """Return how parameters are divided where the experts of each layer are held in an order, ``Shard.order``.

    ``orders``: of each layer with experts, in the order of ``shards``; empty: all ascending.

    Raises:
        SpecError: they are not those of this model's experts.
    """
    layers = {name.rpartition(".")[0]: shard.parts[0] for name, shard in shards.items() if shard.axis == "experts"}
    if not orders:
        return {name: replace(shard, order=()) for name, shard in shards.items()}
    check_expert_order(orders, layers)
    known = dict(zip(layers, orders, strict=True))
    return {name: replace(shard, order=known.get(name.rpartition(".")[0], ())) for name, shard in shards.items()}


@dataclass(frozen=True, slots=True)
class Routed:
    """The tokens of one call of divided experts, between the parts of its forward."""

    tokens: Tensor
    """This copy's own, ``[tokens, hidden]``."""
    rows: tuple[Tensor, ...]
    """What travels: numbers of experts, tokens and weights, then their results."""
    token: Tensor | None = None
    """int64: the number of this copy's token that each row sent is of."""
    travel: _Travel | None = None
    """None where nothing travels."""


class ExpertsParallel(HeldExperts):
    """The experts that one copy holds of a layer; its forward takes this copy's tokens, as the whole layer's does."""

    num_experts: int
    """Experts held here."""
    order: tuple[int, ...] = ()
    """All experts of the layer in the order in which copies hold them; empty: ascending."""
    _places: tuple[tuple[int, ...], Tensor] | None = None
    """That order, and each expert's place in it."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map tokens ``[tokens, hidden]`` to the weighted sums of their experts' outputs, ``[tokens, hidden]``.

        ``top_k_index``: int64 ``[tokens, k]``, numbers among all experts; ``top_k_weights``: ``[tokens, k]``.
        """
        return self.combine(self.compute(self.dispatch(hidden_states, top_k_index, top_k_weights)))

    # The three parts of the forward: other computations may run between them, while tokens travel.

    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Routed:
        """Start to send tokens to the copies that hold their experts."""
        if is_traced():
            return Routed(hidden_states, (traced(self, hidden_states, top_k_index, top_k_weights),))
        group, held = current_group("experts"), self.num_experts
        if group.size == 1:  # while it is captured or measured alone: as many tokens as with an even load
            return Routed(hidden_states, (top_k_index % held, hidden_states, top_k_weights))
        if torch.is_grad_enabled():  # once for a micro-batch: neither in a validation nor in what R repeats
            self.add_loads(torch.bincount(top_k_index.flatten(), minlength=held * group.size))
        if self.order:
            top_k_index = self._places_on(top_k_index.device)[top_k_index]
        holder = top_k_index // held
        wanted = (holder.unsqueeze(-1) == torch.arange(group.size, device=holder.device)).any(1)  # [tokens, copies]
        to, token = wanted.t().nonzero(as_tuple=True)  # a token goes once to each copy that holds experts of it
        counts = wanted.sum(0)
        ones = [1] * group.size
        (received,), arrive = start_exchange(ones, ones, counts)
        numbers = torch.where(holder[token] == to.unsqueeze(-1), top_k_index[token] % held, held)  # held: not there
        rows = numbers, hidden_states[token], top_k_weights[token]
        arrive()
        travel = _Travel(counts.tolist(), received.tolist())
        return Routed(hidden_states, travel.start(*rows), token, travel)

    def _places_on(self, device: torch.device) -> Tensor:
        if self._places is None or self._places[0] != self.order or self._places[1].device != device:
            self._places = self.order, torch.tensor(self.order).argsort().to(device)
        return self._places[1]

    def compute(self, routed: Routed) -> Routed:
        """Compute the tokens that arrive, and start to send their results back."""
        if is_traced():
            return routed
        if routed.travel is None:
            numbers, rows, weights = routed.rows
            return replace(routed, rows=(self.product(rows, numbers, weights),))
        numbers, rows, weights = routed.travel.end(*routed.rows)
        row, place = (numbers < self.num_experts).nonzero(as_tuple=True)
        if len(row):
            of_experts = self.product(rows[row], numbers[row, place, None], weights[row, place, None])
            made = torch.zeros_like(rows).index_add(0, row, of_experts.to(rows.dtype))
        else:
            made = _Unused.apply(rows, weights, *self.parameters())  # type: ignore[no-untyped-call]
        back = _Travel(routed.travel.receives, routed.travel.sends)
        return replace(routed, rows=back.start(made), travel=back)

    @staticmethod
    def combine(routed: Routed) -> Tensor:
        """Add up the results that come back."""
        if routed.travel is None:
            return routed.rows[0]
        (returned,) = routed.travel.end(*routed.rows)
        assert routed.token is not None
        return torch.zeros_like(routed.tokens).index_add(0, routed.token, returned)

    def product(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the forward of the module's own class, with numbers among the experts held here."""
        forward: Any = super().forward
        if hidden_states.dtype == torch.float64:  # torch's grouped product has none: the class's own loop over experts
            forward = partial(getattr(forward, "__wrapped__", forward.__func__), self)
        y: Tensor = forward(hidden_states, top_k_index, top_k_weights)
        return y


def _nothing() -> None:
    """Wait for nothing."""


class _Travel:
    """Rows on their way to other copies, and their gradients on the way back."""

    def __init__(self, sends: Sequence[int], receives: Sequence[int]) -> None:
        self.sends, self.receives = sends, receives
        self.wanted: Sequence[bool] = ()
        """Per tensor, whether its gradient is."""
        self.gradients: list[Tensor] = []
        self.wait = _nothing

    def arrive(self) -> None:
        """Wait for what was started last."""
        wait, self.wait = self.wait, _nothing
        wait()

    def start(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Start to send; the result is filled once ``end`` has returned."""
        result: tuple[Tensor, ...] = _Start.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return result

    def end(self, *started: Tensor) -> tuple[Tensor, ...]:
        """Wait for the rows that ``start`` returned."""
        result: tuple[Tensor, ...] = _End.apply(self, *started)  # type: ignore[no-untyped-call]
        return result


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, travel: _Travel, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.travel, travel.wanted = travel, ctx.needs_input_grad[1:]
        made, travel.wait = start_exchange(travel.sends, travel.receives, *tensors)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        travel: _Travel = ctx.travel
        travel.arrive()
        back = iter(travel.gradients)
        result = [next(back) if wanted else None for wanted in travel.wanted]
        travel.gradients = []
        return None, *result


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, travel: _Travel, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.travel = travel
        travel.arrive()
        ctx.mark_non_differentiable(*(x for x in started if not x.is_floating_point()))
        return started

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Start to send the gradients back; autograd runs what was computed meanwhile before ``_Start.backward``."""
        travel: _Travel = ctx.travel
        chosen = [g for g, wanted in zip(gradients, travel.wanted, strict=True) if wanted]
        travel.gradients, travel.wait = start_exchange(travel.receives, travel.sends, *chosen)
        return None, *gradients


class _Unused(torch.autograd.Function):
    """Experts that got no token: the graph goes on, and their gradients are zero, not missing.

    An update without a gradient is none at all, but one with zero decays weights and momenta as it would elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *parameters)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        others = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return gradients[0], *(torch.zeros_like(x) if wanted else None for x, wanted in others)
