"""Functions with a backward of their own (``torch.autograd.Function``), which an exported graph would forget.

The exporter records what their forward does, and autograd would derive that, which is another gradient wherever the
backward is an estimate or a bound (YOSO, RecurrentGemma). Such a call stops the capture, so its module runs as it is.
A checkpoint in torch's older form is one too; its backward is the derivative, and it is traced as what it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

DERIVATIVES = {"transformers.models.bloom.modeling_bloom.GeLUFunction"}
"""Functions whose backward is the derivative of their forward, so that it does not matter which is used."""


class OwnBackwardError(Exception):
    """A function that is being traced has a backward of its own."""


@contextmanager
def own_backwards() -> Iterator[None]:
    """Stop at calls of such functions inside the block, but for torch's own."""
    plain = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *operands = args  # what it recomputes is the plan's to choose
            return function(*operands)
        traced = any(type(t) not in (Tensor, nn.Parameter) for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
        name = f"{cls.__module__}.{cls.__qualname__}"
        if traced and not name.startswith("torch.") and name not in DERIVATIVES:
            raise OwnBackwardError(f"{cls.__name__} has a backward of its own, which a captured graph would not use")
        return plain.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = plain  # type: ignore[method-assign]
