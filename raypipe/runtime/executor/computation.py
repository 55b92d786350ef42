"""Computes a stage, or a segment of it, forward on micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from raypipe.models import Inputs, Task
from raypipe.models.current_slice import SliceCache, SliceRun, slice_run
from raypipe.models.keyed_random import RandomKeys, with_keys
from raypipe.runtime.backward.deferred import Closure
from raypipe.runtime.backward.segments import RecomputeBoundaries, Segment, as_leaves
from raypipe.runtime.executor.casts import Casts
from raypipe.runtime.executor.metrics import KeepsPredictions, MicrobatchPredictions, Preprocess
from raypipe.runtime.executor.step import StepSettings
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.stage.stage import (
    HalfBatch,
    HalfBatches,
    MicrobatchState,
    OwnGraph,
    StageModule,
    stacked,
    stacked_inputs,
)
from raypipe.runtime.transport.channel import Payload
from raypipe.runtime.update.weight_versions import Snapshot
from raypipe.schedule.ir import Task as PipelineTask
from raypipe.schedule.lowering.programs import Program


@dataclass(frozen=True, slots=True)
class Microbatches:
    """Micro-batches that a stage computes together, of one step."""

    step: int
    ids: tuple[int, ...]
    """Numbers in their step, from 0."""
    rows: tuple[int, ...]
    """Numbers in the data of what they stand for (``Feed.arrange``)."""
    inputs: tuple[Inputs, ...]
    """What the data says of each; see ``StageModule.reads``."""


Forward = Callable[[Callable[[], RandomKeys], Payload, Inputs, Snapshot | None], tuple[Payload, OwnGraph | None]]
"""Computes a compiled forward, the loss included, from what makes its random keys, what arrived, the raw inputs and the
version of the weights; returns the outputs, and what the backward uses if these carry no graph."""


class CompiledForward(Protocol):
    """A compiled stage."""

    def find(self, arrived: Payload, inputs: Inputs, segment: Segment | None) -> Forward | None:
        """Return what computes a forward on these tensors; None if it has to run eagerly."""

    def find_validation(self, arrived: Payload, inputs: Inputs) -> Forward | None:
        """Return what computes it in a validation: on the last stage the prediction, the loss and the task's figures,
        where it has some."""


class StageComputation:
    """Runs the stages of a device forward.

    Args:
        settings: of every step.
        modules: the device's stage replicas.
        task: what the model is trained for; the end of the last stage is its loss.
        casts: casts to the autocast dtype.
        building: what surrounds the forward of a stage replica on a micro-batch (``PostponedGradients.forward``).
    """

    def __init__(
        self,
        settings: StepSettings,
        modules: Mapping[tuple[int, int], StageModule],
        task: Task,
        casts: Casts,
        building: Callable[[tuple[int, int], int], AbstractContextManager[None]],
    ) -> None:
        self.settings, self.modules, self.task, self.casts = settings, modules, task, casts
        self.building = building
        self.training = True
        """Whether dropout draws; validation does not."""
        self.keeps: KeepsPredictions | None = None
        """What keeps the predictions of a validation batch; None if nothing does."""
        self.figures: list[Tensor] = []
        """Of each micro-batch that was validated, its sums of the loss function's figures."""
        self.compiled: dict[tuple[int, int], CompiledForward] = {}
        """The stage replicas that are compiled (``runtime.compiled``)."""
        self.pieces: dict[tuple[tuple[int, int], int, int], list[list[SliceCache]]] = {}
        """Keys and values of micro-batches whose slices have not all run forward, by stage replica, step, number."""
        self.draws: Callable[[int, int, Sequence[int], bool], RandomKeys] = RandomKeys
        """Makes the random keys of a forward."""
        self.turns = Alternation() if settings.sub_pipelined else None

    def _slice(self, key: tuple[int, int], microbatches: Microbatches, remade: bool, again: bool) -> SliceRun | None:
        """Return which slice runs; None where micro-batches run whole. See ``run``."""
        slices = self.settings.slices
        if slices == 1:
            return None
        whole, number = divmod(microbatches.ids[0], slices)
        at = (key, microbatches.step, whole)
        pieces = self.pieces.setdefault(at, [])
        # From here on, the slices' graphs keep what their backwards need.
        if number == 0 if again else number == slices - 1 and not remade:
            del self.pieces[at]
        return SliceRun(number, slices, pieces, again)

    @contextmanager
    def keeping(self, preprocess: Preprocess | None) -> Iterator[list[MicrobatchPredictions]]:
        """Keep the last stage's predictions of what is validated inside, as ``preprocess`` makes them."""
        self.keeps = KeepsPredictions(self.task, preprocess)
        try:
            yield self.keeps.kept
        finally:
            self.keeps = None

    def take_figures(self, targets: int) -> tuple[tuple[str, float], ...]:
        """Return the sums of the loss function's figures since the last call, divided by ``targets``."""
        sums, self.figures = self.figures, []
        if not sums:
            return ()
        means = torch.stack(sums).double().sum(0) / targets
        return tuple(zip(self.task.figures, means.tolist(), strict=True))

    def run(
        self,
        key: tuple[int, int],
        microbatches: Microbatches,
        arrived: Payload,
        weights: Snapshot | None,
        segment: Segment | None = None,
        remade: bool = False,
        again: bool = False,
    ) -> tuple[Payload, OwnGraph | None]:
        """Run a stage replica, or a segment of it, forward.

        Args:
            key: (stage, replica).
            microbatches: what it runs on.
            arrived: what it received.
            weights: the version of its weights; None for the current ones.
            segment: None for the whole stage.
            remade: an R will run this again.
            again: this is an R.

        Returns:
            The outputs (at the end of the last stage, the sum of the losses); and what the backward uses if they carry
            no graph: with ``sub_pipelined``, and where the whole stage ran compiled.
        """
        module = self.modules[key]
        sends_on = module.sends_on
        inputs = stacked_inputs(list(microbatches.inputs)) if module.reads else {}
        program = self._compiled(key, arrived, inputs, segment)
        if program is not None:  # it has no slices, no halves, and its casts are in its graph

            def keys() -> RandomKeys:
                return self._drawn(microbatches.step, self._samples(microbatches))

            # Running statistics note whose moments these are; else keys are made only where something is drawn.
            with with_keys(keys()) if module.statistics else nullcontext():
                computed, graph = program(keys, arrived, inputs, weights)
            if not self.training and not sends_on:
                computed = self._scored(self._samples(microbatches), inputs, *computed)
            return computed, graph
        samples = self._samples(microbatches)
        sliced = self._slice(key, microbatches, remade, again)

        def run(samples: Sequence[int], arrived: Payload, inputs: Inputs) -> Payload:
            drawn = self._drawn(microbatches.step, samples)
            with with_keys(drawn), slice_run(sliced), self.casts.forward(), self.building(key, microbatches.ids[-1]):
                given = self.casts.entering(arrived), inputs, *(() if segment is None else (segment,))
                outputs: Payload = module(*given) if weights is None else functional_call(module, weights, given)
                if not sends_on and (segment is None or not segment.gives):
                    loss = self.task.loss(outputs[0], inputs)
                    if self.training:
                        return (loss,)
                    figures = [self.task.sums_of_figures(outputs[0], inputs)] if self.task.figures else []
                    outputs = self._scored(samples, inputs, outputs[0], loss, *figures)
            return outputs

        if self.turns is None or not module.stacks or segment is not None:
            return run(samples, arrived, inputs), None
        middle = len(samples) // 2
        first, second = (
            tuple(x.detach()[rows].requires_grad_(x.requires_grad) for x in arrived)
            for rows in (slice(None, middle), slice(middle, None))
        )
        made = self.turns.run(
            lambda: run(samples[:middle], first, {name: t[:middle] for name, t in inputs.items()}),
            lambda: run(samples[middle:], second, {name: t[middle:] for name, t in inputs.items()}),
        )
        values = [tuple(y.detach() for y in outputs) for outputs in made]
        whole = stacked(values) if sends_on else (values[0][0] + values[1][0],)
        return whole, HalfBatches(HalfBatch(first, made[0]), HalfBatch(second, made[1]))

    def _samples(self, microbatches: Microbatches) -> list[int]:
        """Return the numbers of the samples in their mini-batch."""
        each = self.settings.samples_per_microbatch
        numbers = [mb // self.settings.slices for mb in microbatches.rows]
        return [sample for mb in numbers for sample in range(mb * each, (mb + 1) * each)]

    def _drawn(self, step: int, samples: Sequence[int]) -> RandomKeys:
        return self.draws(self.settings.seed, step, samples, self.training)

    def _compiled(
        self, key: tuple[int, int], arrived: Payload, inputs: Inputs, segment: Segment | None
    ) -> Forward | None:
        """Return what computes a forward compiled; None if it runs eagerly."""
        compiled = self.compiled.get(key)
        if compiled is None:
            return None
        return compiled.find(arrived, inputs, segment) if self.training else compiled.find_validation(arrived, inputs)

    def _scored(
        self, samples: Sequence[int], inputs: Inputs, prediction: Tensor, loss: Tensor, *figures: Tensor
    ) -> Payload:
        """Keep what is asked of a validation on the last stage; return its output, the loss."""
        if self.keeps is not None:
            self.keeps.add(samples, prediction, inputs)
        self.figures += figures
        return (loss,)

    def run_segments(
        self,
        key: tuple[int, int],
        microbatch: Microbatches,
        arrived: Payload,
        weights: Snapshot | None,
        boundaries: RecomputeBoundaries,
    ) -> Payload:
        """Run a forward that keeps the activations of some layers and recomputes others; see ``segments``."""
        x = arrived
        for segment in self.modules[key].segments:
            if not segment.recomputed:
                x, _ = self.run(key, microbatch, x, weights, segment)
                continue
            boundaries.entries.append(x)
            with torch.no_grad():
                x, _ = self.run(key, microbatch, x, weights, segment)
            if segment.gives:
                x = as_leaves(x, segment.gives)
                boundaries.leaves.append(x)
        return x

    def recompute(self, key: tuple[int, int], microbatch: Microbatches, saved: MicrobatchState) -> None:
        """Recompute the activations that the forward of a micro-batch did not keep."""
        if saved.boundaries is None:
            saved.outputs, saved.graph = self.run(key, microbatch, saved.inputs, saved.weights, again=True)
            return
        recomputed = [s for s in self.modules[key].segments if s.recomputed]
        for segment, entered in zip(recomputed, saved.boundaries.entries, strict=True):
            made, _ = self.run(key, microbatch, entered, saved.weights, segment)
            if segment.gives:
                saved.boundaries.recomputed.append(made)
            else:
                saved.outputs = made
        saved.boundaries.entries = []


# Reverse first-k: the weight gradients of a stage's first layers wait until its last backward has ended.
#
# They are then computed from the first layer on, so that the sum that the next forward needs first starts first. Which
# ones wait is decided when a micro-batch's forward builds its graph: a parameter that does not wait gets its gradient
# from autograd, in the backward, as ever. In a schedule with split backwards, all weight gradients wait for W anyway;
# there only the order within the last W changes.
#
# Source: Oh et al. 2022 (OOO backprop), section 5.1, Algorithm 2.

Key = tuple[int, int]
"""(stage, replica)."""
NOTHING: frozenset[Tensor] = frozenset()


class PostponedGradients:
    """Which weight gradients of a device's stage replicas wait; without ``first_k``, none beyond those of W tasks."""

    def __init__(self, modules: Mapping[Key, StageModule]) -> None:
        self._modules = modules
        self._active = False
        self._layer: dict[Key, dict[Tensor, int]] = {}
        self._first: dict[Key, frozenset[Tensor]] = {}
        self._last: dict[Key, int] = {}
        self._split: set[tuple[int, int]] = set()

    def begin_step(self, program: Program, completes: Collection[PipelineTask], first_k: Mapping[Key, int]) -> None:
        """Begin a step.

        Args:
            program: the device's.
            completes: the tasks that complete a stage replica's gradients and that its sum follows at once.
            first_k: how many of its layers with parameters wait, per stage replica that sums its gradients; empty if
                the job does not ask for it.
        """
        self._active = bool(first_k)
        if not self._active:
            return
        self._split = {(a.task.stage, mb) for a in program.actions if a.task.kind == "W" for mb in a.task.mbs}
        self._last = {(t.stage, t.replica): t.mbs[-1] for t in completes}
        for key, k in first_k.items():
            layers = self._modules[key].trained_by_block
            self._layer[key] = {p: n for n, layer in enumerate(layers[:k]) for p in layer}
            self._first[key] = frozenset(self._layer[key])

    def of(self, key: Key, mb: int) -> frozenset[Tensor] | None:
        """Return the parameters whose gradients for a micro-batch wait; None for all that can (a W task's)."""
        if not self._active or (key[0], mb) in self._split:
            return None
        return self._first.get(key, NOTHING) if self._last.get(key) == mb else NOTHING

    @contextmanager
    def forward(self, key: Key, mb: int) -> Iterator[None]:
        """Surround the part of a forward that builds a micro-batch's graph."""
        queue = self._modules[key].queue
        before, queue.only = queue.only, self.of(key, mb)
        try:
            yield
        finally:
            queue.only = before

    def sort(self, key: Key, closures: list[Closure]) -> None:
        """Put the gradients of the first layers behind all others, from the first layer on."""
        layer = self._layer.get(key) if self._active else None
        if layer:
            closures.sort(key=lambda closure: 1 + min((layer.get(p, -1) for p in closure.parameters), default=-1))
