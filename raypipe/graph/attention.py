"""The arguments of a captured call of ``scaled_dot_product_attention``.

They are (query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False), and by name ``scale`` and ``enable_gqa``.
"""

from __future__ import annotations

from raypipe.graph.calls import Call, Plain

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
