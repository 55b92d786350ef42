"""The interface of a model to the rest of raypipe: numbered layers, which form a DAG, and the results between them.

A layer is a block of a GPT, or a sub-graph of a captured model. Layers are numbered in an order in which they can run,
so any consecutive ones can be a stage of a chain; in a graph of branches a stage is any set of layers
(``graph.liveness``). Raw inputs (tokens, labels, images, masks) are no results: every device reads the data itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import or_
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypipe.errors import RaypipeError, SpecError
from raypipe.graph.liveness import Result, between_parts, live_after
from raypipe.graph.placeholders import Placeholder
from raypipe.job.parallel_spec import check_chunks
from raypipe.models.running_statistics import RunningStatistics
from raypipe.models.task import ANY_LENGTH, Inputs, Labels, Lengths, Task, Unprojected
from raypipe.plan.cut.exact import Runs, cut_ring
from raypipe.plan.cut.layers import LayerCut, Placement, cut_layers, fastest_cut, line_of
from raypipe.schedule.costs import CostTable
from raypipe.tensor import Division, Shard


class BodyEnds(NamedTuple):
    """The numbers of the model's results that a stage receives and sends on."""

    arriving: tuple[int, ...]
    leaving: tuple[int, ...]
    """Empty for the last stage."""


class CutTensor(NamedTuple):
    """One tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    """Whether a gradient is sent back for it; not so for integers, booleans and results of no parameter."""


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """A parameter that several layers share; its holders start equal and sum their gradients, and so stay equal."""

    name: str
    """Its name in checkpoints, which is that of the first holder."""
    parameters: tuple[tuple[int, str], ...]
    """(layer, parameter name) of each holder, the owner first. Names may be equal."""


def equal_slices(sequence: int, slices: int) -> int:
    """Return the length of each of ``slices`` equal slices of a sequence.

    Raises:
        SpecError: they would not be equal.
    """
    if sequence % slices:
        fits = max(k for k in range(1, min(slices, sequence) + 1) if sequence % k == 0)
        why = f"{slices} slices of a sequence of {sequence} would not be equally long"
        raise SpecError("parallel.slices", why, f"use {fits}, or another divisor of {sequence}")
    return sequence // slices


class HeadRows(NamedTuple):
    """The parameters of a linear head."""

    names: tuple[str, ...]
    """Of its weight, and of its bias if it has one."""
    rows: int
    """Of the weight: classes."""
    row_elements: int
    """Elements of all parameters for one row."""


VOCABULARY = "parallel.vocabulary"
"""The key that divides a head."""
Project = Callable[[Tensor, Tensor, Tensor | None], Unprojected]
"""From what a linear head reads, its weight and its bias to what stands for its logits."""


class StageBody(nn.Module, ABC):
    """The layers of one stage, with their parameters."""

    @abstractmethod
    def forward(self, arrived: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """Run the stage.

        Args:
            arrived: the results that the stage was built to receive, in that order; empty for the first stage.
            inputs: at least the raw inputs that the stage reads.

        Returns:
            The results that it was built to send on, in that order; for the last stage, the model's output.
        """

    @abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by a name that does not depend on the plan; tied ones by their owner's."""

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The modules that run one after the other, as finely as the stage was built; by default it is one."""
        return (self,)

    @property
    def statistics(self) -> tuple[RunningStatistics, ...]:
        """Running statistics of the stage's layers, which are learnt without gradients."""
        return ()

    def leave_head_to(self, project: Project) -> None:
        """From now on return what ``project`` makes instead of logits; only of a model's end that is a linear head."""
        raise NotImplementedError


class LayeredModel(ABC):
    """A model as layers, in the precision that it runs in. Constructing one allocates no parameters."""

    names: tuple[str, ...]
    """Name of each layer in reports."""
    tied: tuple[TiedGroup, ...]
    flops: tuple[float, ...]
    """Forward floating-point operations of each layer on one sample."""
    task: Task
    division: Division | None = None
    """How tensor parallelism divides the model, and this process's rank in it; None without tensor parallelism."""
    shards: Mapping[str, Shard] = MappingProxyType({})
    """How each divided parameter is divided, by name."""
    placeholders: tuple[Placeholder, ...] = ()
    """Tokens of which every sample has a fixed number."""
    shortest_slice: int = 1
    """Positions of the shortest slice of a sequence that the model's code allows."""
    packed: bool = False
    """Whether rows hold several documents, none of which sees another."""
    slices: int = 1
    """Parts along the sequence that stages are built to run on; above 1 only where ``slice_lengths`` allows them."""
    batch_statistics: bool = False
    """Whether the result for a sample depends on the other samples of its micro-batch (batch norm, or the model's own
    loss)."""

    loss_chunk: int | None = None
    """Tokens of whose logits the loss is computed at once; None for all."""
    linear_head: bool = False
    """Whether the last layer ends in a linear head."""
    encoder: int = 0
    """How many of the first layers an encoder has under ``placement: encoder``: the last has its last parameter."""
    own_stages: tuple[tuple[int, ...], ...] = ()
    """The layers, the last ones, that every plan has as these stages."""

    @property
    def heads(self) -> Sequence[int]:
        """The layers that end in a linear head whose logits are not to be there whole."""
        return () if self.loss_chunk is None else (self.count - 1,)

    @property
    def head(self) -> HeadRows:
        """The linear head of a model whose head can be divided by rows (``divided_head``).

        Raises:
            SpecError: it cannot.
        """
        why = "split divides a linear head, and this model has none that it can take apart"
        raise SpecError(VOCABULARY, why, "use whole")

    def without_head(self) -> LayeredModel:
        """Return the same model with a last layer that ends with what the head reads; see ``head``."""
        raise NotImplementedError

    def read_by_head(self, samples: int, lengths: Lengths = ANY_LENGTH) -> CutTensor:
        """Return what the head reads of a micro-batch of ``samples``; see ``head`` and ``tensors``."""
        raise NotImplementedError

    def build_head(self, shard: Shard, seed: int, device: torch.device | str = "cpu") -> StageBody:
        """Build the head alone, of its rows those of a share; see ``head`` and ``build_stage``."""
        raise NotImplementedError

    def shard_of(self, name: str, layers: Sequence[int]) -> Shard | None:
        """Return how a parameter of these layers is divided; None if it is whole."""
        return self.shards.get(name)

    def in_chunks(self, tokens: int) -> LayeredModel:
        """Return the same model with the loss of so many tokens at once.

        Raises:
            SpecError: its loss is not the cross-entropy of a linear head.
        """
        if not self.linear_head or not isinstance(self.task, Labels):
            why = "is for models that end in a linear head, with the cross-entropy of its logits, and this one does not"
            raise SpecError("train.loss_chunk_tokens", why, "leave it out")
        other = copy(self)
        other.loss_chunk = tokens
        return other

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the user should know of the model before a run starts."""
        return ()

    def even_length(self) -> int:
        """Return the length at which a document's attention takes as long as all else, in tokens; at least 1."""
        raise NotImplementedError  # only models that documents are packed for have one

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.names)

    @property
    def units(self) -> tuple[range, ...]:
        """Consecutive layers that must stay in one stage, in order; by default each layer is a unit of its own."""
        return tuple(range(i, i + 1) for i in range(self.count))

    @abstractmethod
    def parameters(self, i: int) -> int:
        """Count the elements of layer ``i``'s parameters; tied ones count in each holder."""

    @abstractmethod
    def parameter_names(self, i: int) -> Collection[str]:
        """Return the names of layer ``i``'s parameters."""

    def trained_parameters(self, i: int) -> int:
        """Count those of ``parameters`` that are trained; by default all are."""
        return self.parameters(i)

    def is_trained(self, name: str) -> bool:
        """Return whether the parameter of this name is trained; by default all are."""
        return True

    def frozen_stages(self, cut: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the stages of a cut that have no trained parameter; none where nothing is trained at all."""
        result = tuple(s for s, part in enumerate(cut) if not any(self.trained_parameters(i) for i in part))
        return result if len(result) < len(cut) else ()

    @property
    def results(self) -> tuple[Result, ...]:
        """The tensors that layers hand to one another; by default one from each layer to the next."""
        return tuple(Result(i, (i + 1,)) for i in range(self.count - 1))

    @abstractmethod
    def tensors(self, results: Sequence[int], samples: int, lengths: Lengths = ANY_LENGTH) -> tuple[CutTensor, ...]:
        """Return shape and dtype of some of ``results``, by their numbers, for a micro-batch of ``samples``.

        Raw inputs that ``lengths`` does not name are as long as the longest sample.

        Raises:
            RaypipeError: the model was captured for other lengths only.
        """

    def crossing(self, i: int, samples: int) -> tuple[CutTensor, ...]:
        """Return the tensors that cross a cut of the chain after layer ``i``; see ``tensors``."""
        return self.tensors(live_after(self.results, i), samples)

    def ends_in_chain(self, layers: Sequence[int]) -> BodyEnds:
        """Return what consecutive layers receive and send on as a stage of a chain."""
        return BodyEnds(
            live_after(self.results, layers[0] - 1) if layers[0] else (),
            live_after(self.results, layers[-1]) if layers[-1] < self.count - 1 else (),
        )

    def slice_lengths(self, slices: int) -> Lengths:
        """Return the length of each raw input in a slice, where micro-batches are cut along the sequence.

        Raises:
            SpecError: the model cannot be computed in slices, or its sequence not be cut into so many.
        """
        why = "of this model it is not known that a position depends on no later one"
        raise SpecError("parallel.slices", why, "use slices: 1, or a model of type gpt")

    def chunk_lengths(self, copies: int) -> Lengths:
        """Return the length of each raw input in a chunk, where copies divide sequences into ``2 * copies`` chunks.

        Raises:
            SpecError: the model cannot be computed so, or its sequence not be divided into so many.
        """
        check_chunks(self.positions, copies)
        try:
            return self.slice_lengths(2 * copies)
        except RaypipeError as error:
            raise SpecError("parallel.context", f"{error.where}: {error.why}", "use context: 1") from None

    @property
    @abstractmethod
    def positions(self) -> int:
        """Length of a sample's first raw input: of its sequence, where it has one."""

    @abstractmethod
    def reads(self, layers: Sequence[int]) -> frozenset[str]:
        """Return the raw inputs that these layers read, without those that only the loss reads."""

    @abstractmethod
    def build_stage(
        self, layers: Sequence[int], seed: int, device: torch.device | str = "cpu", ends: BodyEnds | None = None
    ) -> StageBody:
        """Build some layers with their start values, which depend only on (seed, parameter).

        Only these layers' parameters are allocated, and torch's global generators are not used.

        Args:
            layers: their numbers, in order.
            seed: of the start values.
            device: where the parameters are.
            ends: the results that the stage receives and sends on; None for consecutive layers, as a stage of a chain.
        """


class Chain(StageBody):
    """Runs ``parts`` of a stage's layers in sequence; parameters tied between parts are shared, as in one body."""

    def __init__(
        self, model: LayeredModel, parts: Sequence[Sequence[int]], seed: int, device: torch.device | str, ends: BodyEnds
    ) -> None:
        super().__init__()
        handed_on = [ends.arriving, *between_parts(model.results, parts, *ends), ends.leaving]
        bodies = [
            model.build_stage(part, seed, device, BodyEnds(*around))
            for part, around in zip(parts, pairwise(handed_on), strict=True)
        ]
        self.parts = nn.ModuleList(bodies)
        self._bodies = tuple(bodies)
        named_parts = [(set(part), body.named()) for part, body in zip(parts, bodies, strict=True)]
        for group in model.tied:
            tied = [
                named[name]
                for i, name in group.parameters
                for part, named in named_parts
                if i in part and name in named
            ]
            for other in tied[1:]:
                if other is not tied[0]:
                    replace_parameter(self, other, tied[0])
        self._statistics = tuple(one for body in bodies for one in body.statistics)
        self._named: dict[str, nn.Parameter] = {}
        known: set[int] = set()
        for body in bodies:
            for name, parameter in body.named().items():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self._named[name] = parameter

    def forward(
        self, arrived: tuple[Tensor, ...], inputs: Inputs, begin: int = 0, end: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run parts ``begin`` to ``end`` (exclusive), by default all."""
        for part in list(self.parts)[begin:end]:
            arrived = part(arrived, inputs)
        return arrived

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters as a single body would: a tied one under its owner's name."""
        return dict(self._named)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """Those of all parts."""
        return tuple(block for part in self._bodies for block in part.blocks)

    @property
    def statistics(self) -> tuple[RunningStatistics, ...]:
        """Running statistics of all parts."""
        return self._statistics

    def leave_head_to(self, project: Project) -> None:
        """See ``StageBody.leave_head_to``."""
        self._bodies[-1].leave_head_to(project)


def replace_parameter(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place of another, wherever a module holds that."""
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


Cut = tuple[tuple[int, ...], ...]


def split_layers(model: LayeredModel, placement: Placement, step: Callable[[Sequence[float]], float]) -> Cut:
    """Return the layer numbers of each stage. A cut assigns whole units of the model to stages, but for its own ones.

    Args:
        model: the model; its ``flops`` are the costs of its layers.
        placement: the device of every stage, one row per replica of the pipeline.
        step: returns the time of a step, in any unit, given the FLOPs of each stage. It is asked only where balancing
            stages and balancing devices give different cuts, and decides between the two.

    Raises:
        SpecError: there are more stages than units.
    """
    units, own = model.units, model.own_stages
    placement = [row[: len(row) - len(own)] for row in placement]
    flops = [float(sum(model.flops[i] for i in unit)) for unit in units]
    result: LayerCut = fastest_cut(flops, placement, lambda cut: step(cut.stage_cost))
    stages = (tuple(range(units[part[0]].start, units[part[-1]].stop)) for part in result.stages)
    return (*stages, *own)


def split_encoder(model: LayeredModel, placement: Placement) -> tuple[Cut, CostTable]:
    """Return a cut whose first half of the stages is the encoder, as even on devices as can be, and the stages' times.

    B and W take as long as F, where there are any: gradients go back to the first trained layer and no further.

    Args:
        model: the model; its ``flops`` are the costs of its layers.
        placement: of ``placement: encoder``.

    Raises:
        SpecError: the model has no encoder, or one half has fewer units than devices.
    """
    half, units = len(placement[0]) // 2, model.units
    trains = [model.trained_parameters(i) > 0 for i in range(model.count)]
    back = list(accumulate(trains, or_))
    times = [[f * on for f, on in zip(model.flops, kind, strict=True)] for kind in ([True] * model.count, back, trains)]
    costs = [float(sum(sum(kind[unit.start : unit.stop]) for kind in times)) for unit in units]
    middle = sum(unit.stop <= model.encoder for unit in units)
    if not middle:
        why = "encoder, but the model has no parameters that only images, or other inputs that are no tokens, reach"
        raise SpecError("parallel.placement", why, "use line or ring, or a model with an encoder")
    for what, count in (("an encoder", middle), ("a model behind the encoder", len(units) - middle)):
        if count < half:
            raise SpecError("parallel.stages", f"{half} devices for {what} of {count} layers", f"use 1 to {count}")
    even = [cut_layers(part, line_of(half)).starts for part in (costs[:middle], costs[middle:])]
    starts = cut_ring(Runs.of(costs), [*even[0], *(middle + start for start in even[1])], middle)
    cut = tuple(tuple(range(units[a].start, units[b - 1].stop)) for a, b in pairwise([*starts, len(units)]))
    forward, input_grad, weight_grad = (tuple(float(sum(kind[i] for i in part)) for part in cut) for kind in times)
    return cut, CostTable(forward=forward, input_grad=input_grad, weight_grad=weight_grad)
