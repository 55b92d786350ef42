"""Inductor's generated functions without their checks of sizes, strides and alignment.

A generated function checks each tensor that it is given, and each that a kernel of somebody else returns: some forty
checks a micro-batch for a layer of a transformer, in Python. A piece's tensors are laid out alike in every call: their
shapes are compared before it runs (``StageProgram.fits``), what arrives is made contiguous, parameters stay as they
are, and the rest comes from other pieces. So the first call is checked, and no later one.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar

CHECKS = frozenset({"assert_size_stride", "assert_alignment"})
"""The checks, by the names that generated modules give them."""

Call = TypeVar("Call", bound=Callable[..., Any])


def unchecked(call: Call) -> Call:
    """Return a generated function without its checks; ``call`` itself if it has none, or is no generated function.

    Args:
        call: the ``call`` of a module that Inductor has generated, or a compiled graph of Inductor's.
    """
    generated: Any = getattr(call, "current_callable", call)  # of a graph that this process has compiled
    function = generated.__func__ if isinstance(generated, MethodType) else generated
    if not isinstance(function, FunctionType) or not CHECKS & {*function.__code__.co_names}:
        return call
    found = _definition(function)
    if found is None or function.__code__.co_freevars:
        return call
    module = ast.Module([_WithoutChecks().visit(found)], type_ignores=[])
    made: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, made)
    plain = made[function.__name__]
    return MethodType(plain, generated.__self__) if isinstance(generated, MethodType) else plain  # type: ignore[return-value]


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """Return the definition of a function; None if its source is not at hand."""
    source = "".join(linecache.getlines(function.__code__.co_filename))
    line = function.__code__.co_firstlineno
    nodes = ast.walk(ast.parse(source))
    return next((one for one in nodes if isinstance(one, ast.FunctionDef) and one.lineno == line), None)


class _WithoutChecks(ast.NodeTransformer):
    """Leaves out statements that are a check and nothing else."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """See ast.NodeVisitor."""
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in CHECKS:
            return ast.copy_location(ast.Pass(), node)
        return node
