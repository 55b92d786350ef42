"""Compile the stages of one device: trace each, cut it, compile the pieces that its programs run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from raypipe.runtime.compiled.inductor.compile_graph import compile_graph
from raypipe.runtime.compiled.inductor.toolchain import use_cache
from raypipe.runtime.compiled.needs import Example, Needed, Needs, StageNeeds, opaque
from raypipe.runtime.compiled.program import Compiled, CompiledPiece, Pieces, StageProgram
from raypipe.runtime.compiled.stage import CompiledStage, span_of
from raypipe.runtime.compiled.tracing.cut import Cut, GraphPiece, cut, forward_alone
from raypipe.runtime.compiled.tracing.joint import JointGraph, trace, trace_validation
from raypipe.runtime.compiled.tracing.rewrite import prepare
from raypipe.runtime.executor.compile_report import CutReport, StageReport, first_line
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.runtime.update.gradients import StageKey

Build = Callable[[fx.GraphModule, FakeTensorMode, bool], Compiled]
"""Compiles a graph; the last argument says whether it is of a backward."""


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


def trace_stage(module: StageModule, needs: StageNeeds) -> TracedStage:
    """Trace and cut a stage.

    Raises:
        Exception: whatever torch raises for operations that it cannot trace.
    """
    parts = []
    for example in needs.examples:
        joint = trace(module, example)
        prepare(joint)
        parts.append((example, joint, cut(joint, needs.budget)))
    validation, reason = [], None
    try:
        for example in needs.validation:
            joint = trace_validation(module, example)
            prepare(joint)
            validation.append((example, joint, forward_alone(joint)))
    except Exception as error:  # the stage trains compiled all the same
        validation, reason = [], first_line(error)
    return TracedStage(module, needs, parts, validation, reason)


def compile_stage(traced: TracedStage, build: Build = compile_graph) -> CompiledStage:
    """Compile a traced stage.

    Raises:
        Exception: whatever Inductor raises.
    """
    use_cache()
    compiled = CompiledStage()
    for example, joint, pieces in traced.parts:
        built = _built(joint, pieces, traced.needed, build)
        program = StageProgram(traced.module, joint, built, shapes_of(example, joint))
        compiled.programs.setdefault(span_of(example.segment), []).append(program)
    try:
        for example, joint, piece in traced.validation:
            only = Pieces(CompiledPiece(piece, build(piece.graph, joint.fake, False)))
            compiled.validation.append(StageProgram(traced.module, joint, only, shapes_of(example, joint)))
    except Exception as error:
        compiled.validation, traced.eager_validation = [], first_line(error)
    return compiled


def shapes_of(example: Example, joint: JointGraph) -> tuple[TensorSpec, ...]:
    """Return the shapes of the tensors that arrive and of the raw inputs."""
    return (*example.arrived, *(example.inputs[name] for name in joint.inputs))


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


def _built(joint: JointGraph, pieces: Cut, needed: Needed, build: Build) -> Pieces:
    made = {
        name: CompiledPiece(piece, build(piece.graph, joint.fake, name not in ("forward", "forward_only")))
        for name, piece in wanted_pieces(pieces, needed).items()
    }
    return Pieces(**made)


class StageCompiler:
    """Compiles the stages of a device in its own process, for what they need; ``build`` compiles a graph."""

    def __init__(self, executor: Executor, needs: Needs, build: Build = compile_graph) -> None:
        self.executor, self.needs, self.build = executor, needs, build
        self._began: dict[StageKey, float] = {}

    def trace(self, key: StageKey) -> TracedStage | StageReport:
        """Trace and cut one stage; return a report instead where it cannot be."""
        began = self._began[key] = time.monotonic()
        module = self.executor.modules[key]
        reason = opaque(module)
        if reason is None:
            try:
                return trace_stage(module, self.needs.of(key))
            except Exception as error:  # torch raises anything at all; eager runs instead
                reason = first_line(error)
        return StageReport(*key, time.monotonic() - began, reason)

    def compile(self, key: StageKey, traced: TracedStage) -> tuple[CompiledStage | None, StageReport]:
        """Compile a traced stage."""
        try:
            compiled = compile_stage(traced, self.build)
        except Exception as error:  # as above
            return None, StageReport(*key, time.monotonic() - self._began[key], first_line(error))
        seconds = time.monotonic() - self._began[key]
        needs = traced.needs
        counts = needs.lengths, needs.eager_share, len(needs.validation)
        return compiled, StageReport.of(key, seconds, traced.kept, *counts)
