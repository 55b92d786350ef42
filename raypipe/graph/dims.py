"""Symbolic sizes of tensors: an integer, or an expression in the sizes of the model's inputs.

An expression is text such as ``"s0*s1"`` or ``"(s1 - 1)//2 + 1"``, as torch prints symbolic shapes. Since such text is
also read from files, it is evaluated by a small evaluator that supports only arithmetic.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from raypipe.errors import RequestError

Dim = int | str
"""One size of a tensor."""
Sizes = Mapping[str, int]
"""Value of each symbol."""

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_CALLS: dict[str, Callable[..., int]] = {
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "PythonMod": lambda a, b: a % b,
}


def evaluate(dim: Dim, sizes: Sizes) -> int:
    """Evaluate a size.

    Raises:
        RequestError: a symbol has no value, or the text is not arithmetic.

    >>> evaluate("(s1 - 1)//2 + 1", {"s1": 8})
    4
    """
    return dim if isinstance(dim, int) else _value(_parsed(dim), sizes, dim)


def evaluate_all(shape: Sequence[Dim], sizes: Sizes) -> tuple[int, ...]:
    """Evaluate all sizes of a shape."""
    return tuple(evaluate(dim, sizes) for dim in shape)


def count(shape: Sequence[Dim], sizes: Sizes) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(evaluate_all(shape, sizes))


def symbols(dim: Dim) -> frozenset[str]:
    """Return the symbols that a size depends on.

    >>> sorted(symbols("s0*(s1 + 1)"))
    ['s0', 's1']
    """
    if isinstance(dim, int):
        return frozenset()
    functions = {id(node.func) for node in ast.walk(_parsed(dim)) if isinstance(node, ast.Call)}
    return frozenset(n.id for n in ast.walk(_parsed(dim)) if isinstance(n, ast.Name) and id(n) not in functions)


def bind(declared: Mapping[str, Sequence[Dim]], actual: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Find the values of the symbols for which the declared shapes of inputs equal the actual ones.

    Raises:
        RequestError: an input is missing, has another rank, or has a size that the model was not captured for.
    """
    result: dict[str, int] = {}
    for name, shape in declared.items():
        if name not in actual:
            raise RequestError(name, "this input of the model was not given", "give every input it was captured with")
        given = tuple(actual[name])
        if len(given) != len(shape):
            why = f"has shape {given}, but was captured as {tuple(shape)}"
            raise RequestError(name, why, "give it as it was captured")
        for dim, size in zip(shape, given, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                if result.setdefault(dim, size) != size:
                    raise RequestError(name, f"shape {given} does not fit the other inputs", "give inputs of one size")
            elif isinstance(dim, int) and dim != size:
                why = f"has shape {given}, but the model was captured for {tuple(shape)} only"
                raise RequestError(name, why, f"give size {dim} there, or capture again with that size")
    return result


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise RequestError(text, "is not a size of a tensor", "capture the model again") from None


def _value(node: ast.expr, sizes: Sizes, text: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in sizes:
            raise RequestError(text, f"the size {node.id} depends on values, not on shapes", "cut the model elsewhere")
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, sizes, text), _value(node.right, sizes, text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        return _CALLS[node.func.id](*(_value(arg, sizes, text) for arg in node.args))
    raise RequestError(text, "is not a size of a tensor", "capture the model again")
