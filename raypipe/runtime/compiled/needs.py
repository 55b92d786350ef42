"""What a stage has to be compiled for: the pieces that its programs run, and what they are given; plain data.

Where samples differ in length, a stage is compiled for the lengths that most micro-batches are padded to; those of
another length run eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from raypipe.capture.opaque import flat_results
from raypipe.models import Lengths, Task
from raypipe.runtime.backward.segments import Segment
from raypipe.runtime.executor import Executor
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.runtime.update.gradients import StageKey
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.lowering.programs import Program

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


@dataclass(frozen=True)
class Example:
    """What a forward is given, without the values."""

    samples: int
    arrived: tuple[TensorSpec, ...]
    inputs: Mapping[str, TensorSpec]
    """The raw inputs that the stage reads, by name."""
    segment: Segment | None = None
    """The part of the stage that runs; None for all of it."""
    autocast: torch.dtype | None = None
    loss: Task | None = None
    """The task, where its loss is the end of what runs."""
    lengths: tuple[tuple[str, int], ...] = ()
    """What its samples are padded to, by field, where they differ in length."""


@dataclass(frozen=True)
class StageNeeds:
    """What a stage has to be compiled for."""

    needed: Needed
    examples: tuple[Example, ...]
    """What its forwards are given: per length, all of it at once or the segments that R recomputes apart."""
    budget: float
    """Share of the activations to keep from forward to backward."""
    lengths: int
    """Number of lengths of samples."""
    eager_share: float
    """Share of the micro-batches looked at that have another length."""


class Needs:
    """Finds what the stages of a device have to be compiled for.

    Args:
        executor: of the device, set up; its data says what shapes the stages work on.
        programs: those of a step.
        done: number of steps done before.
        budget: ``parallel.activation_memory_budget``.
    """

    def __init__(self, executor: Executor, programs: Collection[Program], done: int = 0, budget: float = 1.0) -> None:
        self.executor, self.programs, self.done, self.budget = executor, programs, done, budget

    def of(self, key: StageKey) -> StageNeeds:
        """Return what a stage replica has to be compiled for."""
        needed = self._needed(key)
        chosen, eager = self._lengths
        budget = 1.0 if needed.recomputes else self.budget
        return StageNeeds(needed, tuple(self._examples(key, needed)), budget, len(chosen), eager)

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
        """Return the examples of all lengths."""
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


def _of_length(spec: TensorSpec, length: int | None) -> TensorSpec:
    """Return the spec of a raw input ``[samples, length, ...]`` at another length; None: it has only one."""
    return spec if length is None else TensorSpec((spec.shape[0], length, *spec.shape[2:]), spec.dtype)


def opaque(module: StageModule) -> str | None:
    """Name the first module that runs as it is, without a graph of its operations."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.target is flat_results:
                return f"{node.args[0].target} could not be captured and runs as it is"
    return None
