"""Replace the random operations of a captured model by keyed ones: dropout, attention with dropout, and all draws.

A site is numbered by the position of its operation among the random operations of the whole model, so that draws do
not depend on the cut. Random operations without a keyed counterpart (``multinomial``, ``randperm``) are rejected,
because their results would depend on the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from raypipe.capture.decode import resolve
from raypipe.capture.opaque import TARGET as OPAQUE
from raypipe.capture.opaque import flat_results
from raypipe.errors import CaptureError
from raypipe.graph.calls import ATTENTION
from raypipe.graph.dims import Dim, Sizes, evaluate_all
from raypipe.graph.operations import Operation, OperationGraph
from raypipe.models.keyed_draws import KEYED, Site, keep_mask, of_channels
from raypipe.models.keyed_random import current_keys, fold64, in_training, keyed_dropout

DROPOUT = "aten.dropout.default"
CHANNELS = "aten.feature_dropout.default"
"""Drops whole channels."""


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
    found: dict[str, Site] = {}
    for operation in graph.operations:
        if not operation.random:
            continue
        few, many = (evaluate_all(_drawn(graph, operation), sizes) for sizes in (small, large))
        dims = [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if b == 2 * a]
        undivided = few if whole is None else whole[len(found)]
        shares = [d for d, (a, b) in enumerate(zip(few, undivided, strict=True)) if a != b]
        batch = dims[0] if dims else None
        longest = tuple(n // 2 if d == batch else n for d, n in enumerate(few))
        found[operation.name] = Site(len(found), batch, shares[0] if shares else None, longest)
    return found


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
        given = operation.operands[0]
        of = graph.operations[given].type if isinstance(given, int) else graph.sources[given].type
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
    found = []
    for add in node.users if "rand" in str(node.target) else ():
        share = next((arg for arg in add.args if isinstance(arg, float)), None)
        if add.target in (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar) and share is not None:
            found += [(user, share) for user in add.users if user.target is torch.ops.aten.floor.default]
    return found


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
    the scores are materialised; in evaluation torch's kernel runs.
    """
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
