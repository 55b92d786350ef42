"""Compile a traced stage into the sources of its pieces."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from raypipe.runtime.compiled.compiler import TracedStage, shapes_of, wanted_pieces
from raypipe.runtime.compiled.inductor.compile_graph import compile_graph
from raypipe.runtime.compiled.layout import Interface, Layout
from raypipe.runtime.compiled.needs import Example
from raypipe.runtime.compiled.stage import span_of
from raypipe.runtime.compiled.stored.document import Part, Source
from raypipe.runtime.compiled.tracing.cut import Piece
from raypipe.runtime.compiled.tracing.joint import Joint
from raypipe.runtime.executor.compile_report import first_line


def compiled_parts(traced: TracedStage) -> list[Part]:
    """Compile the pieces that a stage's programs run, and its forwards in validations as far as they can be.

    Raises:
        ValueError: a piece holds constants that are no part of its source.
        Exception: whatever Inductor raises.
    """
    found = []
    for example, joint, cut in traced.parts:
        pieces = {
            name: Source(_interface(piece), _source(joint, piece, name not in ("forward", "forward_only")))
            for name, piece in wanted_pieces(cut, traced.needed).items()
        }
        found.append(Part(span_of(example.segment), _layout(joint), shapes_of(example, joint), pieces))
    try:
        return [*found, *map(_validation, traced.validation)]
    except Exception as error:  # the stage trains compiled all the same
        traced.eager_validation = first_line(error)
        return found


def _validation(part: tuple[Example, Joint, Piece]) -> Part:
    example, joint, piece = part
    only = {"forward": Source(_interface(piece), _source(joint, piece, False))}
    return Part(None, _layout(joint), shapes_of(example, joint), only, validates=True)


def _source(joint: Joint, piece: Piece, backward: bool) -> str:
    compiled: Any = compile_graph(piece.graph, joint.fake, backward)
    if getattr(compiled, "constants", None) or any(node.op == "get_attr" for node in piece.graph.graph.nodes):
        raise ValueError("it holds constants that a stored program cannot have")
    code: str = compiled.source_code
    return code


def _interface(piece: Piece) -> Interface:
    return Interface(slots=piece.slots, gradients=piece.gradients, back=piece.back, hands=piece.hands)


def _layout(joint: Joint) -> Layout:
    return Layout(**{one.name: getattr(joint, one.name) for one in fields(Layout)})
