"""Divided layers: mixins that add the collectives of tensor parallelism around a layer's forward.

A divided module keeps its path, its parameters' names and the behaviour of its own class. Only its class changes, to a
subclass of one of these mixins and of the class it had. A rank is a tensor rank here, and T the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.tensor.collective_operators import copy_to_group, entered, gathered, left, rows_of_tensor_rank


class ColumnParallel(nn.Module):
    """A layer with divided outputs: it reads a tensor that all ranks hold, and returns this rank's share."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out / T]``."""
        return self.product(entered(x))

    def product(self, x: Tensor) -> Tensor:
        """Compute the forward of the module's own class."""
        y: Tensor = super().forward(x)
        return y


class RowParallel(nn.Module):
    """A layer with divided inputs: it reads this rank's share, and all-reduces the result before adding the bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in / T]`` to ``[..., out]``."""
        y = left(self.product(x))
        # Under autocast the product has a smaller dtype than the bias, and the result keeps it.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Compute this rank's part of the sum, without the bias."""
        return x @ self.weight if is_conv1d(self) else F.linear(x, self.weight)


class HeadParallel(nn.Module):
    """A projection to a divided vocabulary; it reads a tensor that all ranks hold."""

    vocabulary: int
    """Number of rows of the undivided table."""
    gathers: bool
    """Whether to return all logits (all-gather) instead of this rank's share."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., vocabulary]``, or to this rank's share of it."""
        share = self.product(entered(x))
        return gathered(share, self.vocabulary) if self.gathers else share

    def product(self, x: Tensor) -> Tensor:
        """Compute this rank's logits."""
        y: Tensor = super().forward(x)
        return y


class VocabularyParallel(nn.Embedding):
    """An embedding divided by rows: each rank looks up its own rows, and an all-reduce combines them."""

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 ``[...]`` to ``[..., hidden]``."""
        local, own = rows_of_tensor_rank(ids, self.weight.shape[0])
        y = self.product(local).masked_fill(~own.unsqueeze(-1), 0.0)
        if self.padding_idx is not None:  # the padding token's row gets no gradient, on any rank
            y = torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return left(y)

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
    return "linear" if divided and type(module).__mro__[2] is nn.Linear else None


def become(module: nn.Module, kind: str, path: str) -> None:
    """Change a module's class to the divided class of a kind.

    Raises:
        SpecError: the module cannot be divided in that way.
    """
    cls, mixin = type(module), MIXINS[kind]
    name = f"{kind.capitalize()}{cls.__name__}"
    if kind == "shared":
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
