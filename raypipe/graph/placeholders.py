"""Models of images and tokens: which operations an encoder has, and how many tokens stand for its features.

A model puts features of an image in the places of tokens: a sample needs as many of these as its image has features.
transformers' models put them there with ``masked_scatter``, whose mask is where the tokens equal a number. They check
in an eager forward that both are equally many; the exporter drops that check.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from raypipe.graph.dims import Sizes, evaluate_all
from raypipe.graph.operations import GETITEM, OperationGraph, Plain
from raypipe.graph.positions import is_size

_RESHAPES = {"aten.unsqueeze.default", "aten.expand.default", "aten.expand_as.default", "aten.to.dtype"}


class Placeholder(NamedTuple):
    """A token that stands for a feature."""

    input: str
    """The raw input of the model that holds the tokens."""
    token: int
    each: int
    """How many of it a sample has to have."""


def placeholders(graph: OperationGraph, one: Sizes) -> tuple[Placeholder, ...]:
    """Find the tokens whose number in a sample is fixed by shapes; ``one`` are the graph's sizes for one sample."""
    result = []
    for operation in graph.operations:
        if operation.target != "aten.masked_scatter.default":
            continue
        into, mask, features = operation.args
        compared = _compared(graph, mask)
        kinds = [graph.operations[value["op"]].type for value in (into, features) if "op" in value]
        if compared is None or len(kinds) != 2 or None in kinds:
            continue
        width, given = (evaluate_all(kind.shape, one) for kind in kinds if kind is not None)
        result.append(Placeholder(*compared, prod(given) // width[-1]))
    return tuple(dict.fromkeys(result))


def _compared(graph: OperationGraph, mask: Plain) -> tuple[str, int] | None:
    """Return the raw input and the number that a mask compares it with; None of any other mask."""
    while isinstance(mask, dict) and "op" in mask:
        target, args = graph.operations[mask["op"]].target, graph.operations[mask["op"]].args
        if target == "aten.eq.Scalar":
            of = args[0].get("of") if isinstance(args[0], dict) else None
            if of is None or graph.sources[of].kind != "input" or not isinstance(args[1], int):
                return None
            return of, args[1]
        if target not in _RESHAPES:
            return None
        mask = args[0]
    return None


def encoder_operations(graph: OperationGraph) -> tuple[int, ...]:
    """Return an encoder's operations, in order, with all that they read; none without an encoder.

    They are those that read a parameter and follow from raw inputs of which none is a whole number (a token), sizes
    aside.
    """
    floating: list[frozenset[bool]] = []
    wanted: set[int] = set()
    for number, operation in enumerate(graph.operations):
        read = [graph.sources[name] for name in operation.sources]
        by = frozenset(source.type.floating for source in read if source.kind == "input")
        by = frozenset() if is_size(operation) else by.union(*(floating[i] for i in operation.inputs))
        floating.append(by)
        if by == {True} and any(source.kind == "parameter" for source in read):
            wanted.add(number)
    for number in reversed(range(len(floating))):
        if number in wanted:
            wanted.update(graph.operations[number].inputs)
    for number, operation in enumerate(graph.operations):  # the parts of a list, which itself crosses no cut
        if operation.target == GETITEM and wanted.issuperset(operation.inputs):
            wanted.add(number)
    return tuple(sorted(wanted))
