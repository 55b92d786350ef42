"""Models whose forward takes one dict of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def feed_as_dict(module: nn.Module, names: Sequence[str]) -> None:
    """Make a forward that takes one mapping take keywords of these names instead; leave any other forward alone.

    It is such a forward if its one required argument has no array of its name, and is annotated as a mapping or there
    are several arrays.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1 or any(p.name in names for p in parameters):
        return
    annotated = str(required[0].annotation).lower()
    if len(names) < 2 and not any(word in annotated for word in ("dict", "mapping")):
        return
    whole = module.forward

    def forward(**rows: Any) -> Any:
        return whole(rows)

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Mapping) for name in names]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    module.forward = forward
