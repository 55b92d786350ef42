"""Models whose forward takes one dict of tensors, or keywords that its signature does not name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn


def feed_as_dict(module: nn.Module, names: Sequence[str]) -> None:
    """Make a forward that takes one mapping, or ``**kwargs`` alone, take keywords of these names instead.

    Any other forward is left alone.

    It is such a forward if its one required argument has no array of its name, and is annotated as a mapping or there
    are several arrays.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    whole = module.forward
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and all(
        p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters
    ):
        module.forward = _of(names, lambda rows: whole(**rows))
        return
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1 or any(p.name in names for p in parameters):
        return
    annotated = str(required[0].annotation).lower()
    if len(names) < 2 and not any(word in annotated for word in ("dict", "mapping")):
        return
    module.forward = _of(names, whole)


def _of(names: Sequence[str], call: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    def forward(**rows: Any) -> Any:
        return call(rows)

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Mapping) for name in names]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    return forward
