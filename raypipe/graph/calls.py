"""The arguments of a captured operation as JSON data, which can be read without executing any code.

Results of operations are ``{"op": number}``; parameters, buffers, constants and raw inputs are ``{"of": name}``. Values
that JSON cannot represent are ``{"float": "inf"}``, ``{"dtype": "float32"}``, ``{"device": "cpu"}``,
``{"layout": ..}``, ``{"memory_format": ..}``. Other values are stored as they are.

Those of ``scaled_dot_product_attention`` are (query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False), and
by name ``scale`` and ``enable_gqa``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Plain = Any
"""JSON data."""


class Call(NamedTuple):
    """The arguments of one operation."""

    args: list[Plain]
    kwargs: dict[str, Plain]

    def operands(self) -> tuple[int | str, ...]:
        """Return the numbers of the operations and the names of the sources it reads, in the order of the call."""
        return tuple(_operands([self.args, list(self.kwargs.values())]))

    def renumbered(self, new: Mapping[int, int]) -> Call:
        """Return the same call with new numbers of operations."""
        return Call(_renumbered(self.args, new), _renumbered(self.kwargs, new))


def _operands(value: Plain) -> Iterator[int | str]:
    if isinstance(value, list):
        for item in value:
            yield from _operands(item)
    elif isinstance(value, dict):
        yield from (content for key, content in value.items() if key in ("op", "of"))


def _renumbered(value: Plain, new: Mapping[int, int]) -> Plain:
    if isinstance(value, list):
        return [_renumbered(item, new) for item in value]
    if not isinstance(value, dict):
        return value
    return {"op": new[value["op"]]} if "op" in value else {key: _renumbered(v, new) for key, v in value.items()}


ATTENTION = "aten.scaled_dot_product_attention.default"
_MASK, _DROPOUT, _CAUSAL = 3, 4, 5


def mask_of(call: Call) -> int | None:
    """Return the operation that computes the mask; None if no operation does."""
    value = _argument(call, _MASK, "attn_mask", None)
    return value.get("op") if isinstance(value, dict) else None


def dropout_of(call: Call) -> float:
    """Return the probability with which a weight is dropped."""
    return float(_argument(call, _DROPOUT, "dropout_p", 0.0))


def is_causal(call: Call) -> bool:
    """Return whether every query sees only the keys up to its own position, other than by a mask."""
    return bool(_argument(call, _CAUSAL, "is_causal", False))


def without_mask(call: Call, causal: bool) -> Call:
    """Return the same call without a mask, ``causal`` or not."""
    args, kwargs = list(call.args), {key: value for key, value in call.kwargs.items() if key != "attn_mask"}
    if len(args) == _MASK + 1:
        args.pop()
    elif len(args) > _MASK:
        args[_MASK] = None
    if len(args) > _CAUSAL:
        args[_CAUSAL] = causal
    elif causal:
        kwargs["is_causal"] = True
    return Call(args, kwargs)


def _argument(call: Call, place: int, name: str, default: Plain) -> Plain:
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)
