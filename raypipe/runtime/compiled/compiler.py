"""Compile the stages of one device: trace each, cut it, and compile the pieces that its programs run with Inductor.

Inductor's cache lies in raypipe's cache directory. It is torch's own: keyed by the graph, the shapes, torch's version
and the options, safe to share between processes, and so between the stages of a device and the devices of a host, whose
identical kernels are built once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import fx

from raypipe.compat import torch_private
from raypipe.compat.torch_private import FakeTensorMode
from raypipe.runtime.compiled.cut import Cut, GraphPiece, cut, forward_alone, order_collectives
from raypipe.runtime.compiled.layout import GraphLayout, Interface
from raypipe.runtime.compiled.needs import Example, Needed, Needs, StageNeeds, opaque
from raypipe.runtime.compiled.program import CompiledStage, Outcome, StagePart, span_of
from raypipe.runtime.compiled.toolchain import use_cache
from raypipe.runtime.compiled.trace import JointGraph, prepare, register_fallbacks, trace, value
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import CutReport, StageReport, first_line
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.stage import StageModule
from raypipe.schedule.sharding import StageKey

Build = Callable[[fx.GraphModule, FakeTensorMode, bool], Any]
"""Compiles a graph, to a function or to the source of one; the last argument says whether it is of a backward."""
CHECKS = "TORCHINDUCTOR_SIZE_ASSERTS"
"""Torch's variable: with 1, programs check the size, strides and alignment of every tensor in every call."""
Data = TypeVar("Data", GraphLayout, Interface)


def compile_graph(graph: fx.GraphModule, fake: FakeTensorMode, backward: bool) -> Any:
    """Compile a graph without operations in place, whose outputs are a flat tuple of tensors, with Inductor.

    Outputs have the strides that they have in eager mode, since another piece is compiled for them. A piece's tensors
    are laid out alike in every call: their shapes are compared before it runs (``StageProgram.fits``), what arrives is
    made contiguous, parameters stay as they are, and the rest comes from other pieces. So programs do not check their
    tensors, which takes some forty calls for a layer of a transformer, unless ``CHECKS`` asks for it.

    Raises:
        Exception: whatever Inductor raises.
    """
    register_fallbacks(graph.graph)
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    inputs = [value(node) for node in graph.graph.nodes if node.op == "placeholder"]
    checks = os.environ.get(CHECKS) == "1"
    with (
        torch_private.tracing(torch_private.TracingContext(fake)),
        torch.no_grad(),
        torch_private._inductor.config.patch(size_asserts=checks, alignment_asserts=checks),
    ):
        return torch_private.compile_fx_inner(graph, inputs, is_backward=backward, is_inference=False)


def source_of(graph: fx.GraphModule, fake: FakeTensorMode, backward: bool) -> str:
    """Compile a graph; return the Python module that computes it, whose kernels lie in torch's cache.

    Raises:
        ValueError: it holds constants that are no part of its source.
        Exception: whatever Inductor raises.
    """
    compiled = compile_graph(graph, fake, backward)
    if compiled.constants or any(node.op == "get_attr" for node in graph.graph.nodes):
        raise ValueError("it holds constants that a stored program cannot have")
    code: str = compiled.source_code
    return code


@dataclass
class TracedStage:
    """A stage that is traced and cut, and not compiled yet."""

    module: StageModule
    needs: StageNeeds
    parts: list[tuple[Example, JointGraph, Cut]]
    validation: list[tuple[Example, JointGraph, GraphPiece]]
    """Its forwards in validations."""
    eager_validation: str | None = None
    """Why it runs eagerly in validations; None unless something failed."""

    @property
    def needed(self) -> Needed:
        """Which pieces its programs run."""
        return self.needs.needed

    @property
    def kept(self) -> CutReport:
        """Return the consequences of the cut."""
        names = {id(parameter): name for name, parameter in self.module.named.items()}
        held = dict(self.module.named_parameters())
        inside = [
            names[id(held[joint.parameters[number]])]
            for _, joint, pieces in self.parts
            for number in pieces.in_input_grad
            if self.needed.split
        ]
        cuts = [[pieces for *_, pieces in some] for _, some in groupby(self.parts, lambda part: part[0].lengths)]
        return CutReport(
            tuple(dict.fromkeys(inside)),
            max(sum(pieces.kept_bytes for pieces in some) for some in cuts),
            max(sum(pieces.handed_bytes for pieces in some) for some in cuts),
            self.eager_validation,
        )


def trace_stage(module: StageModule, needs: StageNeeds, device: torch.device | None = None) -> TracedStage:
    """Trace and cut a stage; ``device``: see ``trace``.

    Raises:
        Exception: whatever torch raises for operations that it cannot trace.
    """
    parts = [
        (example, joint, cut(joint, needs.budget))
        for example in needs.examples
        for joint in [_joint(module, example, device)]
    ]
    traced = TracedStage(module, needs, parts, [])
    try:
        for example in needs.validation:
            joint = _joint(module, example, device)
            traced.validation.append((example, joint, forward_alone(joint)))
    except Exception as error:  # the stage trains compiled all the same
        traced.validation, traced.eager_validation = [], first_line(error)
    return traced


def _joint(module: StageModule, example: Example, device: torch.device | None) -> JointGraph:
    joint = trace(module, example, device)
    prepare(joint)
    return joint


def compile_parts(traced: TracedStage, build: Build = compile_graph) -> list[StagePart]:
    """Compile the pieces that a stage's programs run, and its forwards in validations as far as they can be.

    Raises:
        Exception: whatever Inductor raises.
    """
    parts = [
        _part(example, joint, wanted_pieces(pieces, traced.needed), build) for example, joint, pieces in traced.parts
    ]
    try:
        return parts + [_part(example, joint, {"forward": piece}, build) for example, joint, piece in traced.validation]
    except Exception as error:  # the stage trains compiled all the same
        traced.eager_validation = first_line(error)
        return parts


def _part(example: Example, joint: JointGraph, pieces: dict[str, GraphPiece], build: Build) -> StagePart:
    shapes = (*example.arrived, *(example.inputs[name] for name in joint.inputs))
    for piece in pieces.values():
        order_collectives(piece)
    built = {
        name: (_data(Interface, piece), build(piece.graph, joint.fake, name not in ("forward", "forward_only")))
        for name, piece in pieces.items()
    }
    return StagePart(span_of(example.segment), _data(GraphLayout, joint), shapes, built, not example.training)


def _data(kind: type[Data], whole: Data) -> Data:
    """Return what a joint graph or a piece is without its graph."""
    return kind(**{field.name: getattr(whole, field.name) for field in fields(kind)})


def wanted_pieces(pieces: Cut, needed: Needed) -> dict[str, GraphPiece]:
    """Return the pieces that a stage's programs run, by the names of ``Pieces``."""
    wanted = {
        "forward": pieces.forward,
        "forward_only": pieces.forward_only if needed.recomputes else None,
        "backward": pieces.backward if needed.joint else None,
        "input_grad": pieces.input_grad if needed.split else None,
        "weight_grad": pieces.weight_grad if needed.split else None,
    }
    return {name: piece for name, piece in wanted.items() if piece is not None}


class InProcess:
    """Compiles the stages of a device in its own process: traced before the first step, compiled in a thread.

    So it is done where layers are measured, which are many and small, without a thread.
    """

    def __init__(self, executor: Executor, needs: Needs, build: Build = compile_graph) -> None:
        self.executor, self._needs, self._build = executor, needs, build
        self.traced: dict[StageKey, TracedStage] = {}
        self._seconds: dict[StageKey, float] = {}
        """What tracing took."""

    @classmethod
    def of_run(cls, setup: Setup, executor: Executor, build: Build = compile_graph) -> InProcess:
        """Return that of a device of a run."""
        return cls(executor, Needs.of_run(setup, executor), build)

    def begin(self, keys: Sequence[StageKey]) -> list[StageReport]:
        """Trace the stages: a trace sets the module's queue, which a running step uses. Return those that fail."""
        refused = []
        for key in keys:
            began = time.monotonic()
            module = self.executor.modules[key]
            reason = opaque(module)
            if reason is None:
                try:
                    self.traced[key] = trace_stage(module, self._needs.of(key))
                except Exception as error:  # torch raises anything at all; eager runs instead
                    reason = first_line(error)
            self._seconds[key] = time.monotonic() - began
            if reason is not None:
                refused.append(StageReport(*key, self._seconds[key], reason))
        return refused

    def find(self) -> Outcome:
        """Compile the stages."""
        use_cache()
        return [(key, *self._compile(key, traced)) for key, traced in self.traced.items()]

    def _compile(self, key: StageKey, traced: TracedStage) -> tuple[CompiledStage | None, StageReport]:
        began, needs = time.monotonic(), traced.needs
        try:
            compiled = CompiledStage.of(traced.module, compile_parts(traced, self._build))
        except Exception as error:  # as above
            return None, StageReport(*key, self._seconds[key] + time.monotonic() - began, first_line(error))
        seconds = self._seconds[key] + time.monotonic() - began
        counts = needs.lengths, needs.eager_share, len(needs.validation)
        return compiled, StageReport.of(key, seconds, traced.kept, *counts)

    @property
    def compiles(self) -> bool:
        """Return whether there are stages to compile: none is stored."""
        return bool(self.traced)

    def close(self) -> None:
        """Nothing can be given up: a thread compiles to the end."""
