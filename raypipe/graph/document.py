"""Convert a captured model's operations to and from a JSON document, which the cache stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.graph.calls import Call
from raypipe.graph.operations import Operation, OperationGraph, Source, TensorType

FORM = 1
"""Version of the format; increased when an older document could be misread."""


def to_document(graph: OperationGraph, calls: Sequence[Call]) -> dict[str, Any]:
    """Convert operations and their calls to JSON data, without the values of buffers and constants."""
    return {
        "form": FORM,
        "operations": [_operation(o, c) for o, c in zip(graph.operations, calls, strict=True)],
        "sources": {n: [s.kind, _type(s.type), s.requires_grad] for n, s in graph.sources.items()},
        "outputs": dict(graph.outputs),
        "tied": [list(group) for group in graph.tied],
        "classes": dict(graph.classes),
        "example": dict(graph.example),
        "at_least": dict(graph.at_least),
        "at_most": dict(graph.at_most),
    }


def from_document(document: Mapping[str, Any]) -> tuple[OperationGraph, tuple[Call, ...]]:
    """Convert JSON data back to operations and their calls.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: the document is malformed or of another version.
    """
    if document["form"] != FORM:
        raise ValueError(f"form {document['form']}, not {FORM}")
    calls = tuple(Call(list(item["args"]), dict(item.get("kwargs", {}))) for item in document["operations"])
    operations: list[Operation] = []
    for item, call in zip(document["operations"], calls, strict=True):
        operands = call.operands()
        if any(isinstance(o, int) and not 0 <= o < len(operations) for o in operands):
            raise ValueError(f"{item['name']} reads a later operation")
        operations.append(_read(item, operands))
    graph = OperationGraph(
        operations=tuple(operations),
        sources={n: Source(kind, TensorType(*_shape(t)), grad) for n, (kind, t, grad) in document["sources"].items()},
        outputs={str(name): int(number) for name, number in document["outputs"].items()},
        tied=tuple(tuple(group) for group in document["tied"]),
        classes=dict(document["classes"]),
        example=dict(document["example"]),
        at_least=dict(document["at_least"]),
        at_most=dict(document["at_most"]),
    )
    missing = {name for o in operations for name in o.sources} - graph.sources.keys()
    if missing or not all(0 <= number < len(operations) for number in graph.outputs.values()):
        raise ValueError(f"it reads sources that do not exist ({sorted(missing)}), or returns such operations")
    return graph, calls


def _operation(operation: Operation, call: Call) -> dict[str, Any]:
    """Convert an operation, leaving out empty values."""
    everything = {
        "name": operation.name,
        "target": operation.target,
        "args": call.args,
        "kwargs": call.kwargs,
        "type": None if operation.type is None else _type(operation.type),
        "module": operation.module,
        "source": operation.source,
        "random": operation.random,
        "mutates": list(operation.mutates),
        "equation": operation.equation,
        "causal": operation.causal,
    }
    return {key: value for key, value in everything.items() if value or key == "args"}


def _read(item: Mapping[str, Any], operands: tuple[int | str, ...]) -> Operation:
    kind = item.get("type")
    return Operation(
        name=item["name"],
        target=item["target"],
        operands=operands,
        type=None if kind is None else TensorType(*_shape(kind)),
        module=item.get("module", ""),
        source=item.get("source", ""),
        random=item.get("random", False),
        mutates=tuple(item.get("mutates", ())),
        equation=item.get("equation", ""),
        causal=item.get("causal", False),
    )


def _type(kind: TensorType) -> list[Any]:
    return [list(kind.shape), kind.dtype]


def _shape(kind: Sequence[Any]) -> tuple[tuple[int | str, ...], str]:
    shape, dtype = kind
    return tuple(shape), dtype
