"""Take apart what models return into tensors, and put it together again.

torch's pytrees know dicts, lists, tuples, named tuples, and classes that somebody has registered. A model may return an
instance of any dataclass (as diffusers' do, which are ordered dicts at the same time) or of another mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree


def as_plain(value: Any) -> Any:
    """Return ``value`` with dicts in place of the dataclasses and mappings in it that torch's pytrees do not know."""
    return pytree.tree_map(_plain, value)


def _plain(value: Any) -> Any:
    parts = _parts(value)
    return value if parts is None else {name: as_plain(part) for name, part in parts.items()}


def like(example: Any, plain: Any) -> Any:
    """Return what ``as_plain(example)`` would be made of, with the values of ``plain``.

    An instance is made by its class of its fields, or of one dict; where its class cannot, it stays a dict.
    """
    leaves, structure = pytree.tree_flatten(example)
    return structure.unflatten(
        [_like(old, new) for old, new in zip(leaves, structure.flatten_up_to(plain), strict=True)]
    )


def _like(example: Any, plain: Any) -> Any:
    parts = _parts(example)
    if parts is None:
        return plain
    made = {name: like(part, plain[name]) for name, part in parts.items()}
    try:
        return type(example)(made) if not is_dataclass(example) else _replaced(example, made)
    except Exception:  # of a class with a constructor of its own
        return made


def _replaced(example: Any, made: dict[str, Any]) -> Any:
    return replace(example, **made)


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or the items of a mapping; None of anything else."""
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else None
