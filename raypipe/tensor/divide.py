"""Divide a model's layers over a tensor-parallel group by a feature table, in place, before it is captured or run.

A divided module keeps its path, its parameters' names and the behaviour of its own class. Only its class changes, to a
subclass of a mixin, which adds the collectives around the layer's forward, and of the class it had. A rank is a tensor
rank here, and T the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.tensor.experts import EXPERTS, ExpertsParallel, experts_of
from raypipe.tensor.group import Axis, Shard
from raypipe.tensor.operators import (
    copy_to_group,
    entered,
    gather_sequence,
    gathered,
    left,
    rows_of_tensor_rank,
    scatter_sequence,
)
from raypipe.tensor.table import Feature, FeatureTable, matches, number, table_for


class _Cut(NamedTuple):
    """One layer and how it is divided."""

    path: str
    module: nn.Module
    feature: Feature
    shards: dict[str, Shard]
    """Per parameter of the module, how it is divided."""
    counts: tuple[tuple[int, str], ...]
    """Counts that must be divisible by the group's size, each with its name."""


def divide(
    model: nn.Module,
    table: FeatureTable,
    config: Any,
    size: int,
    rank: int = 0,
    *,
    gather_logits: bool = True,
    part: bool = False,
) -> dict[str, Shard]:
    """Reduce ``model``, in place, to the share of tensor rank ``rank`` of ``size``. Tied parameters stay tied.

    Args:
        model: its parameters may be real, fake or meta tensors; the shares of fake and meta tensors are equal on all
            ranks, so one capture serves all of them.
        table: which layers are divided.
        config: the model's configuration, from which the table's units are read.
        size: number of ranks.
        rank: the rank whose share is kept.
        gather_logits: whether the head returns all logits; otherwise its share of them, for a divided loss.
        part: whether ``model`` is only a part of a model, which need not have any layer of the table.

    Returns:
        How each divided parameter is divided, by name.

    Raises:
        SpecError: the table does not fit the model, or a count is not divisible; it says which ``size`` would work.
    """
    cuts = list(_cuts(model, table, config, size))
    if not part and not {"column", "row"} <= {cut.feature.kind for cut in cuts}:
        raise SpecError(
            f"feature table {table.family}", f"matches no layers of {type(model).__name__}", "use its own table"
        )
    attributes = list(_attributes(model, table))
    wanted = [(cut.path, *count) for cut in cuts for count in cut.counts]
    _check_divides([*wanted, *((path, value, name) for path, _, name, value in attributes)], size)
    by_parameter: dict[int, tuple[Shard, str]] = {}
    for cut in cuts:
        for name, shard in cut.shards.items():
            path, parameter = f"{cut.path}.{name}", cut.module._parameters[name]
            other = by_parameter.setdefault(id(parameter), (shard, path))
            if other[0] != shard:
                raise SpecError(path, f"is tied to {other[1]}, which is divided differently", "correct the table")
    _check_ties(model, by_parameter, {id(cut.module) for cut in cuts})
    names = {
        n: by_parameter[id(p)][0] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in by_parameter
    }
    _replace(model, by_parameter, rank)
    for cut in cuts:
        _resize(cut)
        if cut.feature.kind == "head":
            cut.module.vocabulary = sum(cut.shards["weight"].parts)  # type: ignore[assignment]
            cut.module.gathers = gather_logits  # type: ignore[assignment]
        become(cut.module, cut.feature.kind, cut.path)
    for _, module, name, value in attributes:
        setattr(module, name, value // size)
    return names


def _cuts(model: nn.Module, table: FeatureTable, config: Any, size: int) -> Iterator[_Cut]:
    for path, module in model.named_modules():
        for pattern, feature in table.modules.items():
            if not matches(pattern, path):
                continue
            if not fits(module, feature.kind):
                raise SpecError(
                    path,
                    f"is a {type(module).__name__}, which cannot be divided as {feature.kind}",
                    "correct the table",
                )
            yield _cut(path, module, feature, config, size)
            break


def _cut(path: str, module: nn.Module, feature: Feature, config: Any, size: int) -> _Cut:
    kind, weight = feature.kind, module._parameters.get("weight")
    if kind == "shared":
        return _Cut(path, module, feature, {}, ())
    assert weight is not None
    # [out, in] in a linear layer and [in, out] in a Conv1D; an embedding's columns are its outputs.
    inputs, outputs = (0, 1) if is_conv1d(module) or isinstance(module, nn.Embedding) else (1, 0)
    dim = {"column": outputs, "head": outputs, "row": inputs, "vocabulary": 0}[kind]
    length = weight.shape[dim]
    padded = kind in ("vocabulary", "head")
    counts = tuple(number(config, key, path) for key in feature.units) or (length,)
    if length % sum(counts):
        why = f"has {length} outputs, which is not a multiple of {' + '.join(feature.units)} = {sum(counts)}"
        raise SpecError(path, why, "correct the table's units")
    shard = Shard(dim, tuple(length // sum(counts) * count for count in counts), size, padded)
    shards = {"weight": shard}
    if kind in ("column", "head") and module._parameters.get("bias") is not None:
        shards["bias"] = Shard(0, shard.parts, size, padded)
    what = feature.units or ("outputs" if kind == "column" else "inputs",)
    return _Cut(path, module, feature, shards, () if padded else tuple(zip(counts, what, strict=True)))


def _attributes(model: nn.Module, table: FeatureTable) -> Iterator[tuple[str, nn.Module, str, int]]:
    for path, module in model.named_modules():
        for pattern, names in table.attributes.items():
            for name in names if matches(pattern, path) else ():
                value = getattr(module, name, None)
                if not isinstance(value, int):
                    raise SpecError(f"{path}.{name}", "is not an integer attribute", "correct the table's attributes")
                yield path, module, name, value


def _check_divides(wanted: Sequence[tuple[str, int, str]], size: int) -> None:
    """Check that all counts, given as (path, count, name), are divisible by ``size``.

    Raises:
        SpecError: one is not; the error names the nearest sizes that all are divisible by.
    """
    for path, count, what in wanted:
        if count % size:
            divisor = gcd(*(count for _, count, _ in wanted))
            sizes = [n for n in range(1, divisor + 1) if divisor % n == 0]
            below, above = max(n for n in sizes if n < size), min((n for n in sizes if n > size), default=0)
            fix = f"use tensor: {below} or {above}" if above else f"use tensor: {below}"
            raise SpecError(path, f"{count} {what} do not divide over tensor = {size}", fix)


def _check_ties(model: nn.Module, divided: dict[int, tuple[Shard, str]], cut: set[int]) -> None:
    """Check that no undivided layer shares a parameter with a divided one.

    Raises:
        SpecError: one does.
    """
    for path, module in model.named_modules():
        if id(module) in cut or not any(fits(module, kind) for kind in ("column", "vocabulary")):
            continue
        for name, parameter in module._parameters.items():
            if id(parameter) in divided:
                why = f"is tied to {divided[id(parameter)][1]}, which the table divides"
                raise SpecError(f"{path}.{name}", why, f"add {path} to the table")


def _replace(model: nn.Module, shards: dict[int, tuple[Shard, str]], rank: int) -> None:
    """Replace parameters by their shares, in every module that has them."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in shards:
                continue
            if id(parameter) not in made:
                share: Tensor = shards[id(parameter)][0].cut(parameter.detach(), rank)
                made[id(parameter)] = nn.Parameter(share, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _resize(cut: _Cut) -> None:
    """Update the attributes that hold a layer's sizes; Conv1D's forward reads them."""
    weight = cut.module._parameters["weight"] if cut.shards else None
    if weight is None:
        return
    if isinstance(cut.module, nn.Linear):
        cut.module.out_features, cut.module.in_features = weight.shape
    elif is_conv1d(cut.module):
        cut.module.nx, cut.module.nf = weight.shape  # type: ignore[assignment]
    elif isinstance(cut.module, nn.Embedding) and cut.feature.kind == "column":
        cut.module.embedding_dim = weight.shape[1]


def divide_module(module: nn.Module, division: Division) -> dict[str, Shard]:
    """Divide a transformers module: its experts, and the rest by the feature table of its family, which it names.

    Raises:
        SpecError: there is no table, the table does not fit, or a size is not divisible.
    """
    config = getattr(module, "config", None)
    return division.divide(module, getattr(config, "model_type", type(module).__name__), config, gather_logits=True)


def divide_experts(model: nn.Module, size: int, copies: int = 0) -> dict[str, Shard]:
    """Reduce every experts module, in place, to the first of ``size`` shares of its experts (``experts_of``).

    Returns:
        How each divided parameter is divided, by name.

    Raises:
        SpecError: there are no experts, they do not divide evenly, or a module's interface is not known.
    """
    result: dict[str, Shard] = {}
    by_parameter: dict[int, tuple[Shard, str]] = {}
    for path, module in experts_of(model, size, copies).items():
        count: int = module.num_experts  # type: ignore[assignment]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                result[f"{path}.{name}"] = Shard(0, (count,), size, axis="experts")
                by_parameter[id(parameter)] = result[f"{path}.{name}"], f"{path}.{name}"
        module.num_experts = count // size  # type: ignore[assignment]
        become(module, EXPERTS, path)
    _replace(model, by_parameter, 0)
    return result


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a model as one process sees it."""

    size: int
    """Number of tensor ranks."""
    tensor_rank: int
    table: str | None = None
    """Path of the user's feature table; None for that of the model's family."""
    experts: int = 1
    """Number of copies that divide the experts."""
    expert_rank: int = 0
    copies: int = field(default=0, compare=False)
    """All copies, which errors name a divisor of; 0: not known yet."""
    expert_orders: tuple[tuple[int, ...], ...] = ()
    """See ``experts.in_order``."""
    sequence: bool = False
    """Whether positions between divided layers are divided too (``parallel.sequence_parallel``)."""

    @property
    def ranks(self) -> dict[Axis, int]:
        """This process's rank in each group."""
        return {"tensor": self.tensor_rank, "experts": self.expert_rank}

    def divide(
        self, model: nn.Module, model_type: str, config: Any, *, gather_logits: bool, part: bool = False
    ) -> dict[str, Shard]:
        """Divide a model whose parameters have no memory yet; see ``divide``.

        Raises:
            SpecError: there is no table, the table does not fit, or a size is not divisible.
        """
        result = divide_experts(model, self.experts, self.copies) if self.experts > 1 else {}
        if self.size > 1:
            table = table_for(model_type, Path(self.table) if self.table is not None else None)
            result |= divide(model, table, config, self.size, gather_logits=gather_logits, part=part)
        return result

    def cut(self, shard: Shard | None, whole: Tensor) -> Tensor:
        """Return this rank's share of a parameter's value; all of it if it is not divided."""
        return whole if shard is None else shard.cut(whole, self.ranks[shard.axis])


# Divided layers.
#
# A captured model's positions are divided in its graph (``graph/sequence_parallel.py``); the built-in GPT has no graph,
# and its layers do that themselves where their ``sequence`` says so.


class _Between(nn.Module):
    """Leads from the tensors between divided layers into these, and back."""

    sequence = 1
    """Number of ranks that divide the positions ``[batch, positions, ...]`` between divided layers."""

    def enter(self, x: Tensor) -> Tensor:
        """Return a tensor as divided layers read it: all positions, on all ranks."""
        return entered(x) if self.sequence == 1 else gather_sequence(x, 1, self.sequence, True)

    def leave(self, partial: Tensor) -> Tensor:
        """Return the sum of what the ranks have computed; of this rank's positions, where these are divided."""
        return left(partial) if self.sequence == 1 else scatter_sequence(partial, 1, self.sequence, True)


class ColumnParallel(_Between):
    """A layer with divided outputs: it reads a tensor that all ranks hold, and returns this rank's share."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out / T]``."""
        return self.product(self.enter(x))

    def product(self, x: Tensor) -> Tensor:
        """Compute the forward of the module's own class."""
        y: Tensor = super().forward(x)
        return y


class RowParallel(_Between):
    """A layer with divided inputs: it reads this rank's share, and all-reduces the result before adding the bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in / T]`` to ``[..., out]``."""
        y = self.leave(self.product(x))
        if self.bias is None:
            return y
        bias = self.bias if self.sequence == 1 else copy_to_group(self.bias)
        # Under autocast the product has a smaller dtype than the bias, and the result keeps it.
        return y + bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Compute this rank's part of the sum, without the bias."""
        return x @ self.weight if is_conv1d(self) else F.linear(x, self.weight)


class HeadParallel(_Between):
    """A projection to a divided vocabulary; it reads a tensor that all ranks hold."""

    vocabulary: int
    """Number of rows of the undivided table."""
    gathers: bool
    """Whether to return all logits (all-gather) instead of this rank's share."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., vocabulary]``, or to this rank's share of it."""
        share = self.product(self.enter(x))
        return gathered(share, self.vocabulary) if self.gathers else share

    def product(self, x: Tensor) -> Tensor:
        """Compute this rank's logits."""
        y: Tensor = super().forward(x)
        return y


class VocabularyParallel(nn.Embedding, _Between):
    """An embedding divided by rows: each rank looks up its own rows, and an all-reduce combines them."""

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 ``[...]`` to ``[..., hidden]``."""
        local, own = rows_of_tensor_rank(ids, self.weight.shape[0])
        y = self.product(local).masked_fill(~own.unsqueeze(-1), 0.0)
        if self.padding_idx is not None:  # the padding token's row gets no gradient, on any rank
            y = torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return self.leave(y)

    def product(self, ids: Tensor) -> Tensor:
        """Look up rows of this rank's share."""
        return F.embedding(ids, self.weight)


class Shared(nn.Module):
    """A layer with undivided parameters on divided values; its parameters' gradients are summed over the group."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's own class."""
        with _summed_gradients(self):
            return super().forward(*args, **kwargs)


@contextmanager
def _summed_gradients(module: nn.Module) -> Iterator[None]:
    own = dict(module._parameters)
    module._parameters.update({name: copy_to_group(p) for name, p in own.items() if p is not None})
    try:
        yield
    finally:
        module._parameters.update(own)


MIXINS: dict[str, type[nn.Module]] = {
    "column": ColumnParallel,
    "row": RowParallel,
    "head": HeadParallel,
    "vocabulary": VocabularyParallel,
    "shared": Shared,
    EXPERTS: ExpertsParallel,
}


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer whose weight is stored as ``[in, out]``."""
    return any(c.__name__ == "Conv1D" for c in type(module).__mro__)


def plain_product(module: nn.Module) -> Literal["linear", "embedding"] | None:
    """Return which function a divided layer's ``product`` is, if just ``F.linear`` or ``F.embedding``; else None.

    The product of a ``RowParallel`` has no bias, which is added after the all-reduce.
    """
    if isinstance(module, VocabularyParallel):
        return "embedding"
    divided = isinstance(module, ColumnParallel | RowParallel | HeadParallel)
    own = next(cls for cls in type(module).__mro__ if not issubclass(cls, _Between))
    return "linear" if divided and own is nn.Linear else None


def become(module: nn.Module, kind: str, path: str) -> None:
    """Change a module's class to the divided class of a kind.

    Raises:
        SpecError: the module cannot be divided in that way.
    """
    cls, mixin = type(module), MIXINS[kind]
    name = f"{kind.capitalize()}{cls.__name__}"
    if kind in ("shared", EXPERTS):
        bases: tuple[type, ...] = (mixin, cls)
    elif isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise SpecError(
                path, "an embedding with max_norm, scale_grad_by_freq or sparse cannot be divided", "leave it out"
            )
        if kind == "column":  # nothing to change: ids have no gradient, and the result is this rank's share
            return
        # The mixin comes after the module's class, whose forward calls its parent's: that is then the divided look-up.
        bases = (mixin,) if cls is nn.Embedding else (cls, mixin)
    else:
        bases = (mixin, cls)
    module.__class__ = bases[0] if len(bases) == 1 else type(name, bases, {})


def fits(module: nn.Module, kind: str) -> bool:
    """Return whether a module of this class can be divided as this kind."""
    if kind == "shared":
        return True
    if kind == "vocabulary":
        return isinstance(module, nn.Embedding)
    if kind == "row" and not is_conv1d(module):
        # The forward of a subclass may do more than the product, and then the all-reduce would sum something else.
        return type(module) is nn.Linear
    return isinstance(module, nn.Linear) or is_conv1d(module) or (kind == "column" and isinstance(module, nn.Embedding))
