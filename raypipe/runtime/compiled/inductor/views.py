"""A compiled piece that computes nothing: all its outputs are inputs in another shape.

W is one where all its gradients are products, which are added by whoever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_helpers: Any = torch._C._dynamo.guards
_view = _helpers._reinterpret_tensor
"""What Inductor's programs call for a view; it takes a fifth of the time of ``torch.as_strided``."""


class View(NamedTuple):
    """One output."""

    source: int
    """The input whose memory it is."""
    size: tuple[int, ...] | None
    """None for the input itself."""
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Elements from the input's first one."""


@dataclass(frozen=True)
class Views:
    """Makes the outputs; inputs have the strides that the piece was traced with."""

    outputs: tuple[View, ...]

    def __call__(self, values: list[Tensor]) -> Sequence[Tensor]:
        """Take the inputs in a list, which is emptied, and return the outputs."""
        made = [
            values[source] if size is None else _view(values[source], size, stride, offset)
            for source, size, stride, offset in self.outputs
        ]
        values.clear()
        return made

    @property
    def source_code(self) -> str:
        """A Python module whose ``call`` does the same."""
        rows = ", ".join(repr(tuple(one)) for one in self.outputs)
        return f"from {__name__} import View, Views\n\ncall = Views(tuple(View(*one) for one in [{rows}]))\n"
