"""Compile the stages of one device: trace each, cut it, compile the pieces that its programs run.

Where samples differ in length, a stage is compiled for the lengths that most micro-batches are padded to; those of
another length run eagerly.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from raypipe.capture.opaque import flat_results
from raypipe.models import Lengths
from raypipe.runtime.backward.segments import Segment
from raypipe.runtime.compiled.cut import Cut, Piece, cut
from raypipe.runtime.compiled.inductor import Compiled, compile_graph, use_cache
from raypipe.runtime.compiled.joint import Example, Joint, trace
from raypipe.runtime.compiled.program import CompiledPiece, Pieces, StageProgram
from raypipe.runtime.compiled.report import StageReport, first_line
from raypipe.runtime.compiled.rewrite import prepare
from raypipe.runtime.compiled.stage import CompiledStage, span_of
from raypipe.runtime.executor import Executor
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.runtime.update.gradients import StageKey
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.lowering.programs import Program

Build = Callable[[fx.GraphModule, FakeTensorMode, bool], Compiled]
"""Compiles a graph; the last argument says whether it is of a backward."""

MOST_LENGTHS = 5
"""Lengths that a stage is compiled for."""
LOOKED_AT = 50
"""Steps whose micro-batches say which lengths are frequent."""


@dataclass(frozen=True)
class Needed:
    """Which pieces of a stage its programs run."""

    joint: bool
    split: bool
    recomputes: bool
    """Whether an R task recomputes some micro-batches."""
    keeps: bool
    """Whether the forward of some micro-batches keeps all that the backward needs."""
    microbatch: int
    """A micro-batch that the stage works on, by number in its step."""


@dataclass
class TracedStage:
    """A stage that is traced and cut, and not compiled yet."""

    key: StageKey
    module: StageModule
    needed: Needed
    parts: list[tuple[Example, Joint, Cut]]
    began: float


class StageCompiler:
    """Compiles the stages of a device.

    Args:
        executor: of the device, set up; its data says what shapes the stages work on.
        programs: those of a step.
        done: number of steps done before.
        budget: ``parallel.activation_memory_budget``.
        build: compiles one graph.
    """

    def __init__(
        self, executor: Executor, programs: Collection[Program], done: int = 0, budget: float = 1.0,
        build: Build = compile_graph,
    ) -> None:  # fmt: skip
        self.executor, self.programs, self.done, self.budget, self.build = executor, programs, done, budget, build

    def trace(self, key: StageKey) -> TracedStage | StageReport:
        """Trace and cut one stage; return a report instead where it cannot be."""
        began = time.monotonic()
        module = self.executor.modules[key]
        reason = _opaque(module)
        if reason is None:
            try:
                needed = self._needed(key)
                budget = 1.0 if needed.recomputes else self.budget
                parts = []
                for example in self._examples(key, needed):
                    joint = trace(module, example)
                    prepare(joint)
                    parts.append((example, joint, cut(joint, budget)))
                return TracedStage(key, module, needed, parts, began)
            except Exception as error:  # torch raises anything at all; eager runs instead
                reason = first_line(error)
        return StageReport(*key, time.monotonic() - began, reason)

    def compile(self, traced: TracedStage) -> tuple[CompiledStage | None, StageReport]:
        """Compile a traced stage."""
        use_cache()
        compiled = CompiledStage()
        try:
            for example, joint, pieces in traced.parts:
                built = self._built(joint, pieces, traced.needed)
                specs = (*example.arrived, *(example.inputs[name] for name in joint.inputs))
                program = StageProgram(traced.module, joint, built, specs)
                compiled.programs.setdefault(span_of(example.segment), []).append(program)
        except Exception as error:  # as above
            return None, StageReport(*traced.key, time.monotonic() - traced.began, first_line(error))
        return compiled, self._report(traced)

    def _built(self, joint: Joint, pieces: Cut, needed: Needed) -> Pieces:
        def build(piece: Piece, backward: bool = True) -> CompiledPiece:
            return CompiledPiece(piece, self.build(piece.graph, joint.fake, backward))

        return Pieces(
            build(pieces.forward, False),
            build(pieces.forward_only, False) if needed.recomputes else None,
            build(pieces.backward) if needed.joint else None,
            build(pieces.input_grad) if needed.split else None,
            build(pieces.weight_grad) if needed.split else None,
        )

    def _report(self, traced: TracedStage) -> StageReport:
        names = {id(parameter): name for name, parameter in traced.module.named.items()}
        held = dict(traced.module.named_parameters())
        inside = [
            names[id(held[joint.parameters[number]])]
            for _, joint, pieces in traced.parts
            for number in pieces.in_input_grad
            if traced.needed.split
        ]
        cuts = [[pieces for *_, pieces in some] for _, some in groupby(traced.parts, lambda part: part[0].lengths)]
        kept = max(sum(pieces.kept_bytes for pieces in some) for some in cuts)
        handed = max(sum(pieces.handed_bytes for pieces in some) for some in cuts)
        chosen, eager = self._lengths
        return StageReport(
            *traced.key, time.monotonic() - traced.began, None, tuple(dict.fromkeys(inside)), kept, handed,
            len(chosen), eager,
        )  # fmt: skip

    @cached_property
    def _lengths(self) -> tuple[list[Lengths], float]:
        """The most frequent lengths, the same on every device, and the share of micro-batches of all others."""
        feed, microbatches = self.executor.feed, self.executor.settings.microbatches
        if not feed.lengths("train", self.done, 0):
            return [{}], 0.0
        steps = range(self.done, self.done + LOOKED_AT)
        found = Counter(tuple(feed.lengths("train", step, mb).items()) for step in steps for mb in range(microbatches))
        chosen = found.most_common(MOST_LENGTHS)
        return [dict(lengths) for lengths, _ in chosen], 1.0 - sum(n for _, n in chosen) / found.total()

    def _needed(self, key: StageKey) -> Needed:
        programs, microbatches = self.programs, self.executor.settings.microbatches
        every = [action.task for program in programs for action in program.actions]
        tasks = [task for task in every if (task.stage, task.replica) == key]
        kinds = {task.kind for task in tasks}
        recomputed = {pair for program in programs for pair in program.recomputed}
        keeps = any((key[0], mb) not in recomputed for task in tasks if task.kind == "F" for mb in task.mbs)
        first = next(task.mbs[0] for task in tasks if task.kind == "F")
        return Needed(
            not kinds.isdisjoint(JOINT) or "W" not in kinds, "W" in kinds, "R" in kinds, keeps,
            first % microbatches,
        )  # fmt: skip

    def _examples(self, key: StageKey, needed: Needed) -> list[Example]:
        """Return what the stage's forwards are given, per length."""
        module = self.executor.modules[key]
        inputs = self.executor.feed.inputs("train", self.done, needed.microbatch) if module.reads else {}
        read = {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in inputs.items() if name in module.reads}
        return [one for lengths in self._lengths[0] for one in self._examples_of(key, needed, read, lengths)]

    def _examples_of(
        self, key: StageKey, needed: Needed, read: Mapping[str, TensorSpec], lengths: Lengths
    ) -> list[Example]:
        """Return what they are given for one length: all of it at once, or the segments that R recomputes apart."""
        executor, module = self.executor, self.executor.modules[key]
        read = {name: _of_length(spec, lengths.get(name)) for name, spec in read.items()}
        arrived: tuple[TensorSpec, ...] = executor.io_specs.arriving(key[0], lengths)
        task = None if module.sends_on else executor.task
        samples, autocast = executor.settings.samples_per_microbatch, executor.settings.autocast
        padded = tuple(lengths.items())
        whole = Example(samples, arrived, read, None, autocast, task, padded)
        if not needed.recomputes or module.recomputes_whole:
            return [whole]
        found = [whole] if needed.keeps else []
        for segment in module.segments:
            loss = task if not segment.gives else None
            found.append(Example(samples, arrived, read, segment, autocast, loss, padded))
            arrived = self._leaving(module, segment, lengths) if segment.gives else ()
        return found

    def _leaving(self, module: StageModule, segment: Segment, lengths: Lengths) -> tuple[TensorSpec, ...]:
        """Return what a segment passes to the next one."""
        handed_on, samples = module.between[segment.end - 1], self.executor.settings.samples_per_microbatch
        tensors = self.executor.io_specs.model.tensors(handed_on, samples, lengths)
        return tuple(TensorSpec(t.shape, t.dtype) for t in tensors)


def swap_in(executor: Executor, ready: Mapping[StageKey, CompiledStage]) -> None:
    """Run these stages compiled from the next step on, and all others eagerly."""
    for key, module in executor.modules.items():
        was, now = key in executor.computation.compiled, key in ready
        if was != now:
            module.defers = now or module.splits
    executor.computation.compiled = dict(ready)


def _of_length(spec: TensorSpec, length: int | None) -> TensorSpec:
    """Return the spec of a raw input ``[samples, length, ...]`` at another length; None: it has only one."""
    return spec if length is None else TensorSpec((spec.shape[0], length, *spec.shape[2:]), spec.dtype)


def _opaque(module: StageModule) -> str | None:
    """Name the first module that runs as it is, without a graph of its operations."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.target is flat_results:
                return f"{node.args[0].target} could not be captured and runs as it is"
    return None
