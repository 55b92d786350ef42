"""The pieces that a stage's programs run, for which it is compiled, and what they are given; plain data.

Where samples differ in length, a stage is compiled for the lengths that most micro-batches are padded to; those of
another length run eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from raypipe.capture.opaque import flat_results
from raypipe.data.sample_order import Split
from raypipe.models import Lengths, Task
from raypipe.runtime.backward.segments import Segment
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.sharding import StageKey
from raypipe.tensor.experts import ExpertsParallel

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
    """The arguments of a forward, without the values."""

    samples: int
    arrived: tuple[TensorSpec, ...]
    inputs: Mapping[str, TensorSpec]
    """The raw inputs that the stage reads, by name."""
    segment: Segment | None = None
    """The part of the stage that runs; None for all of it."""
    autocast: torch.dtype | None = None
    loss: Task | None = None
    """The task, where its loss is the end of what runs."""
    training: bool = True
    """False for a validation: nothing is dropped, and no gradient is computed."""
    lengths: tuple[tuple[str, int], ...] = ()
    """What its samples are padded to, by field, where they differ in length."""


@dataclass(frozen=True)
class StageNeeds:
    """All that a stage has to be compiled for."""

    needed: Needed
    examples: tuple[Example, ...]
    """What its forwards are given: per length, all of it at once or the segments that R recomputes apart."""
    budget: float
    """Share of the activations to keep from forward to backward."""
    lengths: int
    """Number of lengths of samples."""
    eager_share: float
    """Share of the micro-batches looked at that have another length."""
    validation: tuple[Example, ...] = ()
    """What its forwards are given in validations, per length; empty where it is not compiled for them."""


class Needs:
    """Finds what the stages of a device have to be compiled for.

    Args:
        executor: of the device, set up; its data says what shapes the stages work on.
        programs: those of a step.
        done: number of steps done before.
        budget: ``parallel.activation_memory_budget``.
        validates: the program of a validation batch, and the number of batches; None to compile for training alone.
    """

    def __init__(
        self,
        executor: Executor,
        programs: Collection[Program],
        done: int = 0,
        budget: float = 1.0,
        validates: tuple[Program, int] | None = None,
    ) -> None:
        self.executor, self.programs, self.done, self.budget = executor, programs, done, budget
        self.validates = validates

    @classmethod
    def of_run(cls, setup: Setup, executor: Executor) -> Needs:
        """Return those of a device of a run. A single validation, at its end, is not worth compiling for."""
        train, budget = setup.job.train, setup.parallel.activation_memory_budget
        validates = (setup.evaluate, train.eval_batches) if train.eval_every else None
        return cls(executor, tuple(setup.train.values()), setup.done, budget, validates)

    def of(self, key: StageKey) -> StageNeeds:
        """Return what a stage replica has to be compiled for."""
        needed = self._needed(key)
        chosen, eager = self._lengths
        budget = 1.0 if needed.recomputes else self.budget
        read = self._read(key, needed)
        examples = [one for lengths in chosen for one in self._examples_of(key, needed, read, lengths)]
        validation = tuple(self._validation(key, read))
        return StageNeeds(needed, tuple(examples), budget, len(chosen), eager, validation)

    @cached_property
    def _lengths(self) -> tuple[list[Lengths], float]:
        """The most frequent lengths, the same on every device, and the share of micro-batches of all others."""
        return self._frequent("train", range(self.done, self.done + LOOKED_AT))

    def _frequent(self, split: Split, steps: range) -> tuple[list[Lengths], float]:
        feed, microbatches = self.executor.feed, self.executor.settings.microbatches
        if not feed.lengths(split, steps.start, 0):
            return [{}], 0.0
        result = Counter(tuple(feed.lengths(split, step, mb).items()) for step in steps for mb in range(microbatches))
        chosen = result.most_common(MOST_LENGTHS)
        return [dict(lengths) for lengths, _ in chosen], 1.0 - sum(n for _, n in chosen) / result.total()

    def _needed(self, key: StageKey) -> Needed:
        programs, microbatches = self.programs, self.executor.settings.microbatches
        every = [action.task for program in programs for action in program.actions]
        tasks = [task for task in every if (task.stage, task.replica) == key]
        kinds = {task.kind for task in tasks}
        recomputed = {pair for program in programs for pair in program.recomputed}
        keeps = any((key[0], mb) not in recomputed for task in tasks if task.kind == "F" for mb in task.mbs)
        first = next(task.mbs[0] for task in tasks if task.kind == "F")
        return Needed(
            not kinds.isdisjoint(JOINT) or "W" not in kinds, "W" in kinds, "R" in kinds, keeps, first % microbatches
        )

    def _read(self, key: StageKey, needed: Needed) -> dict[str, TensorSpec]:
        """Return the raw inputs that a stage reads of a micro-batch; those of a validation are alike."""
        module = self.executor.modules[key]
        inputs = self.executor.feed.inputs("train", self.done, needed.microbatch) if module.reads else {}
        return {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in inputs.items() if name in module.reads}

    def _validation(self, key: StageKey, read: Mapping[str, TensorSpec]) -> Iterator[Example]:
        """Return what the forwards of a validation are given, all of the stage at once."""
        if self.validates is None:
            return
        program, batches = self.validates
        counts = [
            len(a.task.mbs) for a in program.actions if a.task.kind == "F" and (a.task.stage, a.task.replica) == key
        ]
        together = max(counts) if self.executor.modules[key].stacks else 1
        for lengths in self._frequent("val", range(min(batches, LOOKED_AT)))[0]:
            one = replace(self._whole(key, read, lengths), training=False)
            yield replace(
                one,
                samples=one.samples * together,
                arrived=tuple(_rows(spec, together) for spec in one.arrived),
                inputs={name: _rows(spec, together) for name, spec in one.inputs.items()},
            )

    def _whole(self, key: StageKey, read: Mapping[str, TensorSpec], lengths: Lengths) -> Example:
        """Return what the forward of a whole stage is given for micro-batches of one length."""
        executor, module = self.executor, self.executor.modules[key]
        return Example(
            executor.settings.samples_per_microbatch,
            executor.io_specs.arriving(key[0], lengths),
            {name: _of_length(spec, lengths.get(name)) for name, spec in read.items()},
            None,
            executor.settings.autocast,
            None if module.sends_on else executor.task,
            lengths=tuple(lengths.items()),
        )

    def _examples_of(
        self, key: StageKey, needed: Needed, read: Mapping[str, TensorSpec], lengths: Lengths
    ) -> list[Example]:
        """Return what they are given for one length: all of it at once, or the segments that R recomputes apart."""
        module = self.executor.modules[key]
        whole = self._whole(key, read, lengths)
        if not needed.recomputes or module.recomputes_whole:
            return [whole]
        result, arrived = [whole] if needed.keeps else [], whole.arrived
        for segment in module.segments:
            loss = whole.loss if not segment.gives else None
            result.append(replace(whole, arrived=arrived, segment=segment, loss=loss))
            arrived = self._leaving(module, segment, lengths) if segment.gives else ()
        return result

    def _leaving(self, module: StageModule, segment: Segment, lengths: Lengths) -> tuple[TensorSpec, ...]:
        """Return what a segment passes to the next one."""
        handed_on, samples = module.between[segment.end - 1], self.executor.settings.samples_per_microbatch
        tensors = self.executor.io_specs.model.tensors(handed_on, samples, lengths)
        return tuple(TensorSpec(t.shape, t.dtype) for t in tensors)


def _of_length(spec: TensorSpec, length: int | None) -> TensorSpec:
    """Return the spec of a raw input ``[samples, length, ...]`` at another length; None: it has only one."""
    return spec if length is None else TensorSpec((spec.shape[0], length, *spec.shape[2:]), spec.dtype)


def _rows(spec: TensorSpec, times: int) -> TensorSpec:
    """Return the spec of several micro-batches' rows in one tensor."""
    return spec if times == 1 else TensorSpec((times * spec.shape[0], *spec.shape[1:]), spec.dtype)


def opaque(module: StageModule) -> str | None:
    """Name the first module that runs as it is, without a graph of its operations."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.target is flat_results:
                called = node.args[0] if node.args[0].op == "call_module" else node.args[0].args[0]
                if isinstance(part.get_submodule(called.target), ExpertsParallel):
                    continue  # two operators of the graph
                return f"{called.target} could not be captured and runs as it is"
    return None
