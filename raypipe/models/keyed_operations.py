"""Replace the random operations of a captured model by keyed ones: dropout, attention with dropout, and all draws.

A site is numbered by the position of its operation among the random operations of the whole model, so that draws do
not depend on the cut. Random operations without a keyed counterpart (``multinomial``, ``randperm``) are rejected,
because their results would depend on the process.

Numbers depend on (seed, step, sample, place), as dropout's masks do: they come from ``keyed_random``'s hash, 52 bits
for each. In evaluation a draw is its mean: stochastic depth then changes nothing, noise is absent, and ``rrelu`` has
its mean slope, as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from raypipe.capture.opaque import ALPHA_DROPOUT, flat_results
from raypipe.capture.opaque import TARGET as OPAQUE
from raypipe.capture.stage_module import resolve
from raypipe.errors import CaptureError
from raypipe.graph.dims import Dim, Sizes, evaluate_all
from raypipe.graph.operations import ATTENTION, Operation, OperationGraph
from raypipe.models.attention import Dropped, causal_attention
from raypipe.models.current_slice import current_chunks, current_slice
from raypipe.models.keyed_random import Site, current_keys, fold64, halves_at, in_training, keyed_dropout

aten = torch.ops.aten
DROPOUT = "aten.dropout.default"
CHANNELS = "aten.feature_dropout.default"
"""Drops whole channels."""
BITS = 52
"""Random bits of a number: so many that the middles of all intervals are float64 values."""
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a dtype's significand: numbers in [0, 1) are rounded down to them, so that none becomes 1."""
LAYERS = 1 << 20
"""The dropout behind layer n of a recurrent operation has the place's number plus (n + 1) times this."""


def keyed_uniform(
    size: Sequence[int],
    site: int,
    batch_dim: int | None = 0,
    divided_dim: int | None = None,
    longest: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return float64 numbers of this size, uniform on (0, 1), from ``random_keys``; arguments as ``keyed_dropout``."""
    halves = halves_at(size, site, batch_dim, divided_dim, longest, torch.device(device), each=4)
    bits = halves.contiguous().view(torch.int64).squeeze(-1) & ((1 << BITS) - 1)
    numbers = (bits.to(torch.float64) + 0.5) * 2.0**-BITS
    return numbers.movedim(0, batch_dim) if batch_dim else numbers


def _uniform(place: Site, size: Sequence[int], device: torch.device) -> Tensor:
    return keyed_uniform(size, *place, device=device)


def _normal(place: Site, size: Sequence[int], device: torch.device) -> Tensor:
    if not in_training():
        return torch.zeros(tuple(size), dtype=torch.float64, device=device)
    return torch.erfinv(2 * _uniform(place, size, device) - 1) * math.sqrt(2.0)


def _as_rand(place: Site, size: Sequence[int], device: torch.device, dtype: torch.dtype | None) -> Tensor:
    kind = dtype or torch.get_default_dtype()
    if not in_training():
        return torch.full(tuple(size), 0.5, dtype=kind, device=device)
    levels = 2.0 ** DIGITS[kind]
    return ((_uniform(place, size, device) * levels).floor_() / levels).to(kind)


class _Draw(NamedTuple):
    """A call of one of torch's draws: ``rand``, ``Tensor.normal_`` and the like."""

    place: Site
    given: Mapping[str, Any]
    """Its arguments by name, with defaults."""
    size: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype | None
    """What it asks for, or has of a tensor that it is given."""

    def rand(self) -> Tensor:
        return _as_rand(self.place, self.size, self.device, self.dtype)

    def randn(self) -> Tensor:
        return _normal(self.place, self.size, self.device).to(self.dtype or torch.get_default_dtype())

    def normal(self) -> Tensor:
        mean, std = self.given["mean"], self.given["std"]
        return mean + std * self.randn()  # type: ignore[no-any-return]

    def uniform(self) -> Tensor:
        low, high = self.given["from"], self.given["to"]
        return low + (high - low) * self.rand()  # type: ignore[no-any-return]

    def exponential(self) -> Tensor:
        """By inverting the distribution."""
        x, rate = self.given["self"], self.given["lambd"]
        if not in_training():
            return torch.full_like(x, 1.0 / rate)
        made: Tensor = -torch.log1p(-_uniform(self.place, self.size, self.device)) / rate
        return made.to(x.dtype)

    def bernoulli(self) -> Tensor:
        """With one probability, or a tensor of them; without a gradient."""
        x: Tensor = self.given["self"]
        p: float | Tensor = self.given.get("p", x.detach())
        if not in_training():
            return torch.full_like(x, p) if not isinstance(p, Tensor) else p.to(x.dtype).expand_as(x)
        return (_uniform(self.place, self.size, self.device) < p).to(x.dtype)

    def randint(self) -> Tensor:
        low, high = self.given.get("low", 0), self.given["high"]
        half = torch.full(self.size, 0.5, device=self.device) if not in_training() else None
        u = _uniform(self.place, self.size, self.device) if half is None else half
        return (u * (high - low)).floor().to(self.dtype or torch.int64) + low  # type: ignore[no-any-return]


def draw(operator: Any, distribution: Callable[[_Draw], Tensor]) -> Callable[..., Tensor]:
    """Return the function that draws by key in the place of an operator."""
    declared = [(argument.name, argument.default_value) for argument in operator._schema.arguments]

    def keyed_draw(place: Site, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(declared) | dict(zip((name for name, _ in declared), args, strict=False)) | kwargs
        likes = [t for t in (given.get(name) for name in ("self", "mean", "std")) if isinstance(t, Tensor)]
        size, device = given.get("size"), given.get("device") or torch.device("cpu")
        if size is None:
            size = torch.broadcast_shapes(*(t.shape for t in likes))  # type: ignore[no-untyped-call]
        dtype = given.get("dtype") or (likes[0].dtype if likes else None)
        return distribution(_Draw(place, given, tuple(size), likes[0].device if likes else device, dtype))

    return keyed_draw


def rrelu(place: Site, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any) -> Tensor:
    """``F.rrelu``: every negative value gets a slope of its own."""
    slope = lower + (upper - lower) * _as_rand(place, x.shape, x.device, x.dtype)
    return torch.where(x < 0, x * slope, x)


def alpha_dropout(place: Site, x: Tensor, p: float, channels: bool) -> Tensor:
    """``F.alpha_dropout``, or ``F.feature_alpha_dropout`` of whole channels.

    Source: Klambauer et al. 2017 (self-normalizing networks), section "New dropout technique".
    """
    if not in_training():
        return x
    low = -1.7580993408473766
    size = of_channels(x.shape) if channels else x.shape
    kept = (_uniform(place, size, x.device) < 1 - p).to(x.dtype)
    scale = 1 / math.sqrt((low * low * p + 1) * (1 - p))
    return scale * (x * kept + low * (1 - kept)) - scale * low * p


def feature_dropout(place: Site, x: Tensor, p: float, *_: Any) -> Tensor:
    """``F.dropout1d``, ``dropout2d`` and ``dropout3d``: whole channels."""
    if not in_training():
        return x
    kept = (_uniform(place, of_channels(x.shape), x.device) < 1 - p).to(x.dtype)
    return x * kept / (1 - p)


def of_channels(size: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape of a mask for whole channels ``[samples, channels, ...]``."""
    return (*size[:2], *(1 for _ in size[2:]))


def recurrent(function: Callable[..., Any], states: int) -> Callable[..., tuple[Tensor, ...]]:
    """Make a recurrent operation (``states`` tensors of state) whose dropout between layers draws by key."""

    def layer_by_layer(
        place: Site,
        x: Tensor,
        hidden: Any,
        weights: Sequence[Tensor],
        biased: bool,
        layers: int,
        p: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        hidden = list(hidden) if states > 1 else [hidden]
        ways = 1 + both
        each = len(weights) // layers
        result = []
        for n in range(layers):
            own = [h[n * ways : (n + 1) * ways] for h in hidden]
            mine = list(weights[n * each : (n + 1) * each])
            x, *left = function(x, own if states > 1 else own[0], mine, biased, 1, 0.0, train, both, batch_first)
            result.append(left)
            if n < layers - 1:
                longest = None if place.longest is None else (*place.longest[:-1], x.shape[-1])
                x = keyed_dropout(x, p, place.number + (n + 1) * LAYERS, place.batch_dim, None, longest)
        return x, *(torch.cat(parts) for parts in zip(*result, strict=True))

    return layer_by_layer


RECURRENT = {
    aten.lstm.input: recurrent(aten.lstm.input, 2),
    aten.gru.input: recurrent(aten.gru.input, 1),
    aten.rnn_tanh.input: recurrent(aten.rnn_tanh.input, 1),
    aten.rnn_relu.input: recurrent(aten.rnn_relu.input, 1),
}
"""Recurrent operations with dropout between their layers."""
_DRAWS: dict[Callable[[_Draw], Tensor], tuple[Any, ...]] = {
    _Draw.rand: (aten.rand.default, aten.rand_like.default),
    _Draw.randn: (aten.randn.default, aten.randn_like.default),
    _Draw.normal: (
        *(aten.normal.float_float, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor),
        aten.normal_functional.default,
    ),
    _Draw.uniform: (aten.uniform.default,),
    _Draw.exponential: (aten.exponential.default,),
    _Draw.bernoulli: (aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor),
    _Draw.randint: (aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype),
}
KEYED: dict[Any, Callable[..., Any]] = {
    **{operator: draw(operator, made) for made, operators in _DRAWS.items() for operator in operators},
    aten.rrelu.default: rrelu,
    ALPHA_DROPOUT: alpha_dropout,
    aten.feature_dropout.default: feature_dropout,
    **RECURRENT,
}
"""Per operation of torch, the function that draws by key in its place."""


def keep_mask(mask: Tensor, share: float) -> Tensor:
    """``floor(share + rand)``, which transformers' drop path keeps samples by; in evaluation its mean."""
    return mask.floor() if in_training() else torch.full_like(mask, share)


def random_shapes(graph: OperationGraph, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a model's random operations draw, in order."""
    return [evaluate_all(_drawn(graph, o), sizes) for o in graph.operations if o.random]


def find_sites(
    graph: OperationGraph, small: Sizes, large: Sizes, whole: Sequence[tuple[int, ...]] | None = None
) -> dict[str, Site]:
    """Find the random operations of a model, by name.

    Args:
        graph: the model.
        small: its sizes for some number of samples.
        large: its sizes for twice as many samples.
        whole: for a divided model, the ``random_shapes`` of the undivided one at size ``small``; a dimension in which
            the shapes differ is divided.

    Raises:
        CaptureError: an operation draws random numbers in a way that random keys cannot reproduce.
    """
    result: dict[str, Site] = {}
    for operation in graph.operations:
        if not operation.random:
            continue
        few, many = (evaluate_all(_drawn(graph, operation), sizes) for sizes in (small, large))
        dims = [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if b == 2 * a]
        undivided = few if whole is None else whole[len(result)]
        shares = [d for d, (a, b) in enumerate(zip(few, undivided, strict=True)) if a != b]
        batch = dims[0] if dims else None
        longest = tuple(n // 2 if d == batch else n for d, n in enumerate(few))
        result[operation.name] = Site(len(result), batch, shares[0] if shares else None, longest)
    return result


def _drawn(graph: OperationGraph, operation: Operation) -> tuple[Dim, ...]:
    """Return the shape of the tensor that an operation draws: its result's, the attention weights', or a mask's.

    Raises:
        CaptureError: the operation has no keyed counterpart.
    """
    if operation.target == OPAQUE:
        return ()
    known = operation.target in (DROPOUT, ATTENTION) or resolve(operation.target) in KEYED
    if not known:
        where = ", ".join(p for p in (f"operation {operation.name}", operation.module, operation.source) if p)
        why = f"{operation.target} draws random numbers that would depend on the process that runs it"
        fix = "use dropout, torch.rand, randn, bernoulli, normal or randint, or switch it off in the configuration"
        raise CaptureError(where, why, fix)
    if operation.type is None:  # a recurrent operation, with dropout of all layers' results but the last's
        of = graph.type_of(operation.operands[0])
        assert of is not None, "recurrent operations read a tensor"
        return of.shape
    made = operation.type.shape
    if operation.target == CHANNELS:
        return of_channels(made)
    if operation.target != ATTENTION:
        return made
    key = graph.operations[operation.inputs[1]].type
    assert key is not None, "attention reads tensors"
    return (*made[:-1], key.shape[-2])


def key_random_operations(module: fx.GraphModule, sites: dict[str, Site]) -> None:
    """Replace each random operation of a graph by its keyed counterpart, in place."""
    for node in module.graph.nodes:
        site = sites.get(node.name) if node.op == "call_function" else None
        if site is None:
            continue
        if node.target is flat_results:
            called, path = node.args[0], f"_seeded_{site.number}"
            module.add_submodule(path, SeededModule(module.get_submodule(str(called.target)), site.number))
            called.target = path
            continue
        if node.target is torch.ops.aten.dropout.default:
            x, p = node.args[:2]
            node.target, node.args, node.kwargs = keyed_dropout, (x, p, *site), {}
        elif node.target in KEYED:
            for floor, share in _kept_by(node):
                floor.target, floor.args = keep_mask, (*floor.args, share)
            node.target, node.args = KEYED[node.target], (site, *node.args)
        elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
            node.target, node.kwargs = keyed_attention, {**node.kwargs, "site": site}
    module.recompile()


def _kept_by(node: fx.Node) -> list[tuple[fx.Node, float]]:
    """Find ``floor(share + rand)``, as in transformers' drop path: the floors with their shares."""
    result = []
    for add in node.users if "rand" in str(node.target) else ():
        share = next((arg for arg in add.args if isinstance(arg, float)), None)
        if add.target in (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar) and share is not None:
            result += [(user, share) for user in add.users if user.target is torch.ops.aten.floor.default]
    return result


def keyed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    site: Site,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` with dropout from ``random_keys``.

    Shapes are ``[..., queries, width]`` and ``[..., keys, width]``. No kernel accepts a dropout mask, so in training
    the scores are materialised; in evaluation torch's kernel runs. A part of a sequence, whose attention is causal,
    sees the keys and values before it too.
    """
    if current_slice() is not None or current_chunks():
        return causal_attention(query, key, value, scale, enable_gqa, Dropped(dropout_p, site))
    if not in_training():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
    # A row whose keys are all masked becomes zeros, as in the kernels.
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return keyed_dropout(weights, dropout_p, *site) @ value


# Modules that run as they are and draw random numbers: the generator is seeded before each call.
#
# The draws inside such a module are not operations of the graph, so they cannot be keyed by sample. They follow from
# (seed, step, first sample of the micro-batch, place): the same on every device, in every schedule, after every resume
# and in a recomputed forward, but other ones for another size of micro-batch. In evaluation the module runs in
# evaluation mode.
class SeededModule(nn.Module):
    """Calls ``part`` with random numbers of place ``site``."""

    def __init__(self, part: nn.Module, site: int) -> None:
        super().__init__()
        self._part = (part,)  # not registered: the graph holds it under its own path
        self.site = site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        (part,) = self._part
        keys = current_keys()
        if not in_training():
            with _evaluating(part):
                return part(*args, **kwargs)
        devices = {p.device for p in part.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
            if keys is not None:
                torch.manual_seed(fold64(keys.samples[0] if keys.samples else keys.shared, self.site) >> 1)
            return part(*args, **kwargs)


@contextmanager
def _evaluating(part: nn.Module) -> Iterator[None]:
    modes = [(inner, inner.training) for inner in part.modules()]
    part.eval()
    try:
        yield
    finally:
        for inner, training in modes:
            inner.training = training
