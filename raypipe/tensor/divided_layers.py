"""What a layer does once its parameters are divided: the same classes with the group's exchanges around their forward.

A module keeps its place, its parameters' names and what its own class adds; only its class changes, to a subclass made
of one of those here and the class it had.
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


class Column(nn.Module):
    """Divided outputs: reads what all members hold, gives this member's share of the result."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out / T]``."""
        return self.product(entered(x))

    def product(self, x: Tensor) -> Tensor:
        """What the class did before."""
        y: Tensor = super().forward(x)
        return y


class Row(nn.Module):
    """Divided inputs: reads this member's share, gives the sum over all; each adds the bias, which is whole."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in / T]`` -> ``[..., out]``."""
        y = left(self.product(x))
        # As narrow as the product, which autocast makes narrower than the bias.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """This member's part of the sum."""
        return x @ self.weight if is_conv1d(self) else F.linear(x, self.weight)


class Head(nn.Module):
    """Projection to a divided vocabulary: reads what all hold, gives all logits."""

    vocabulary: int
    """Rows of the whole table."""
    gathers: bool
    """Give all logits, not this member's alone."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` -> ``[..., vocabulary]``."""
        share = self.product(entered(x))
        return gathered(share, self.vocabulary) if self.gathers else share

    def product(self, x: Tensor) -> Tensor:
        """This member's logits."""
        y: Tensor = super().forward(x)
        return y


class Vocabulary(nn.Embedding):
    """Look-up in a table divided by rows: each member adds the rows it holds."""

    def forward(self, ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        local, held = rows_of_tensor_rank(ids, self.weight.shape[0])
        y = self.product(local).masked_fill(~held.unsqueeze(-1), 0.0)
        if self.padding_idx is not None:  # whose row gets no gradient, in whichever share it is
            y = torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)
        return left(y)

    def product(self, ids: Tensor) -> Tensor:
        """Rows of this member's share."""
        return F.embedding(ids, self.weight)


class Shared(nn.Module):
    """Whole parameters used on divided values: their gradient is the sum of what each member sees of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
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
    "column": Column, "row": Row, "head": Head, "vocabulary": Vocabulary, "shared": Shared,
}  # fmt: skip


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is stored as ``[in, out]``."""
    return any(c.__name__ == "Conv1D" for c in type(module).__mro__)


def plain_product(module: nn.Module) -> Literal["linear", "embedding"] | None:
    """What ``product`` of a divided layer is, where it is nothing but ``F.linear`` or ``F.embedding``; else None.

    A row's product has no bias: that is added to the sum.
    """
    if isinstance(module, Vocabulary):
        return "embedding"
    divided = isinstance(module, Column | Row | Head)
    return "linear" if divided and type(module).__mro__[2] is nn.Linear else None


def become(module: nn.Module, kind: str, path: str) -> None:
    """Change a module's class to the divided one of its kind.

    Raises:
        SpecError: a layer that cannot be divided so.
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
        if kind == "column":  # token ids have no gradient: what follows is this member's share
            return
        # Behind the class it had, whose forward calls its parent's: the look-up then is the divided one.
        bases = (mixin,) if cls is nn.Embedding else (cls, mixin)
    else:
        bases = (mixin, cls)
    module.__class__ = bases[0] if len(bases) == 1 else type(name, bases, {})


def fits(module: nn.Module, kind: str) -> bool:
    """Whether a module of this class can be divided as this kind."""
    if kind == "shared":
        return True
    if kind == "vocabulary":
        return isinstance(module, nn.Embedding)
    if kind == "row" and not is_conv1d(module):
        # A subclass's forward may do more than the product; its sum over members would then be of something else.
        return type(module) is nn.Linear
    return isinstance(module, nn.Linear) or is_conv1d(module) or (kind == "column" and isinstance(module, nn.Embedding))
