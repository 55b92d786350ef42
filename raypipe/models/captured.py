"""A captured module as a list of layers: each of its sub-graphs is a layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from raypipe.capture.captured import Captured
from raypipe.capture.stage_module import build_subgraph, compute_meanwhile
from raypipe.errors import CaptureError, RunError, SpecError
from raypipe.graph.dims import Sizes, evaluate_all
from raypipe.graph.liveness import Result, between_spans, inputs_read
from raypipe.graph.operation_costs import forward_flops
from raypipe.graph.operations import ATTENTION, Operation, OperationGraph, TensorType, needed, selected
from raypipe.graph.placeholders import encoder_operations, placeholders
from raypipe.graph.positions import LONGEST, Flow, sequence_flow
from raypipe.graph.subgraphs import Subgraphs, piece_sharding, shard
from raypipe.models.attention import attend_by_document, causal_attention, share_heads
from raypipe.models.current_slice import positions_of
from raypipe.models.keyed_operations import find_sites, key_random_operations, random_shapes
from raypipe.models.keyed_random import keyed_dropout
from raypipe.models.layered import (
    BodyEnds,
    CutTensor,
    HeadRows,
    LayeredModel,
    Project,
    StageBody,
    TiedGroup,
    equal_slices,
)
from raypipe.models.running_statistics import (
    RunningStatistics,
    check_buffers,
    learn_statistics,
    uses_batch_statistics,
)
from raypipe.models.sources.packed_rows import given_positions
from raypipe.models.start_values import StartValues
from raypipe.models.task import ANY_LENGTH, Field, Inputs, Lengths, NextToken, Task, Unprojected
from raypipe.tensor import Division, Shard, in_order

Unmixed = Literal["branches", "encoder"]
"""What layers do not mix, as ``parallel.placement`` says."""


class Share(NamedTuple):
    """This process's share of a model that tensor ranks or copies divide."""

    division: Division
    shards: Mapping[str, Shard]
    whole: OperationGraph | None
    """Graph of the undivided model; None if all that is random has the same shapes in both."""


NEVER = 1 << 40
"""Length at which the attention of a model without any takes as long as all else."""


class CapturedModel(LayeredModel):
    """A model whose layers are the sub-graphs of a captured module.

    Parameters have the names that the module gives them; a tied parameter has its owner's.

    Args:
        captured: the module's operations.
        task: the loss.
        values: start values of the parameters.
        fields: per raw input of the model, its name and its field in the data.
        build: constructs the module, for submodules that run opaquely.
        share: this process's share under tensor parallelism; None for the whole model.
        unmixed: ``branches``: keep parallel branches apart, each piece between two joins a layer
            (``graph.branch_order``). ``encoder``: an encoder's operations come first, so that what tokens
            reach neither crosses its cuts nor joins its layers.
        packed: rows hold several documents, none of which sees another.

    Raises:
        CaptureError: the model writes buffers other than batch norm's, or draws random numbers in a way that random
            keys cannot reproduce.
    """

    def __init__(
        self,
        captured: Captured,
        task: Task,
        values: StartValues,
        fields: Mapping[str, tuple[str, Field]],
        build: Callable[[], nn.Module],
        share: Share | None = None,
        unmixed: Unmixed | None = None,
        packed: bool = False,
    ) -> None:
        self.task, self.values, self.build, self.packed = task, values, build, packed
        self.fields = {name: fields[name] for name in captured.graph.inputs}
        written = captured.graph  # in the order of the model's code, which numbers random operations
        if unmixed == "branches":
            from raypipe.graph.branch_order import branch_order  # networkx

            pieces = branch_order(written, self.sizes(1, written))
            captured = replace(captured, graph=selected(written, [n for piece in pieces for n in piece]))
        elif unmixed == "encoder":
            order = dict.fromkeys((*encoder_operations(written), *range(len(written.operations))))
            captured = replace(captured, graph=selected(written, list(order)))
        self.captured, self.graph = captured, captured.graph
        graph = self.graph
        self._divide(piece_sharding(graph, [len(p) for p in pieces]) if unmixed == "branches" else shard(graph))
        if unmixed == "encoder" and (encoder := encoder_operations(graph)):
            self.encoder = bisect_right(self.sharding.starts, encoder[-1])
        self.drops_attention = any(o.random and o.target == ATTENTION for o in graph.operations)
        """Whether training drops weights of attention."""
        self.shortest_slice = max(graph.at_least.values(), default=1)
        check_buffers(graph)
        self.batch_statistics = task.of_microbatch or any(map(uses_batch_statistics, graph.operations))
        one = self.sizes(1)
        self.placeholders = tuple(
            result._replace(input=self.fields[result.input][0]) for result in placeholders(graph, one)
        )
        undivided = share.whole if share is not None else None
        whole = random_shapes(undivided, self.sizes(2, undivided)) if undivided is not None else None
        self.sites = find_sites(written, self.sizes(2), self.sizes(4), whole)
        if share is not None:
            self.division, self.shards = share.division, share.shards

    def _divide(self, sharding: Subgraphs) -> None:
        """Take these sub-graphs as layers."""
        graph, one, self.sharding = self.graph, self.sizes(1), sharding
        self.names = tuple(f"{i} {label}" for i, label in enumerate(sharding.labels))
        self.edges = (*sharding.starts, sharding.end)
        self._handed_on, self._results = between_spans(graph, sharding.starts)
        self.held = tuple(
            graph.parameters_of([graph.operations[i] for i in range(a, b)]) for a, b in pairwise(self.edges)
        )
        self.tied = tuple(
            TiedGroup(name, tuple((i, name) for i in holders))
            for name in graph.parameters
            if len(holders := [i for i, names in enumerate(self.held) if name in names]) > 1
        )
        head = graph.linear_head
        self.linear_head = bool(head) and head[0] >= sharding.starts[-1]
        self.flops = tuple(sum(forward_flops(graph, i, one) for i in range(a, b)) for a, b in pairwise(self.edges))

    def as_if_deeper(self, more: int) -> CapturedModel:
        """Return the model in the sub-graphs that it has where its last block but one comes so many times more."""
        other = copy(self)
        other._divide(shard(self.graph, more=more))
        return other

    def sizes(self, samples: int, graph: OperationGraph | None = None, lengths: Lengths = ANY_LENGTH) -> Sizes:
        """Return the values of the symbolic sizes in the model's shapes, or in another graph with the same inputs."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (data_name, field) in self.fields.items():
            shape = (lengths[data_name], *field.shape[1:]) if data_name in lengths else field.shape
            shapes[name] = (samples, *shape)
        return (graph or self.graph).sizes(shapes)

    def even_length(self) -> int:
        """See ``LayeredModel.even_length``: of ``a n + b n^2`` operations for n tokens, ``a / b``."""
        n = self.positions
        once, twice = (self._flops_of(tokens) for tokens in (n, 2 * n))
        square = (twice - 2 * once) / (2 * n * n)
        return max(1, round(once / n / square - n)) if square > 0 else NEVER

    def _flops_of(self, tokens: int) -> float:
        sizes = self.sizes(1, lengths={name: tokens for name, field in self.fields.values() if field.shape})
        return sum(forward_flops(self.graph, i, sizes) for i in range(len(self.graph.operations)))

    def parameters(self, i: int) -> int:
        """Count the elements of sub-graph ``i``'s parameters; tied ones count in each holder."""
        return sum(self.graph.parameters[name] for name in self.held[i])

    def parameter_names(self, i: int) -> Collection[str]:
        """See ``LayeredModel.parameter_names``."""
        return self.held[i]

    def trained_parameters(self, i: int) -> int:
        """Count those of ``parameters`` that are trained."""
        return sum(self.graph.parameters[name] for name in self.held[i] if self.is_trained(name))

    def is_trained(self, name: str) -> bool:
        """Return whether the parameter of this name is trained."""
        return self.graph.sources[name].requires_grad

    @property
    def notices(self) -> tuple[str, ...]:
        """See ``LayeredModel.notices``."""
        return self.values.notices

    @property
    def results(self) -> tuple[Result, ...]:
        """The operations' results that other sub-graphs read; see ``LayeredModel.results``."""
        return self._results

    def tensors(self, results: Sequence[int], samples: int, lengths: Lengths = ANY_LENGTH) -> tuple[CutTensor, ...]:
        """See ``LayeredModel.tensors``."""
        sizes = self.sizes(samples, lengths=lengths)
        numbers = [self._handed_on[r] for r in results]
        return tuple(
            CutTensor(evaluate_all(kind.shape, sizes), getattr(torch, kind.dtype), self.graph.requires_grad[number])
            for number, kind in ((number, _type(self.graph.operations[number])) for number in numbers)
        )

    @property
    def positions(self) -> int:
        """Length of the first raw input of one sample; 1 for a number."""
        _, field = next(iter(self.fields.values()))
        return field.shape[0] if field.shape else 1

    def reads(self, layers: Sequence[int]) -> frozenset[str]:
        """Return the raw inputs that these sub-graphs need, also for cheap operations that every stage repeats."""
        return frozenset(self.fields[name][0] for name in inputs_read(self.graph, self._operations(layers)))

    @property
    def head(self) -> HeadRows:
        """See ``LayeredModel.head``."""
        operations = self.graph.linear_head
        if not self.linear_head or operations != tuple(range(operations[0], len(self.graph.operations))):
            return super().head
        names = self.graph.parameters_of([self.graph.operations[operations[0]]])
        shape = _type(self.graph.operations[operations[0]]).shape
        rows = int(evaluate_all(shape[-1:], self.sizes(1))[0])
        return HeadRows(names, rows, sum(self.graph.parameters[name] for name in names) // rows)

    def without_head(self) -> CapturedModel:
        """See ``LayeredModel.without_head``."""
        other, head, names = copy(self), self.graph.linear_head, self.head.names
        other.linear_head, other.edges = False, (*self.edges[:-1], head[0])
        other.held = (*self.held[:-1], tuple(name for name in self.held[-1] if name not in names))
        product = sum(forward_flops(self.graph, n, self.sizes(1)) for n in head)
        other.flops = (*self.flops[:-1], self.flops[-1] - product)
        other._handed_on = (*self._handed_on, *self.graph.operations[head[0]].inputs)
        return other

    def read_by_head(self, samples: int, lengths: Lengths = ANY_LENGTH) -> CutTensor:
        """See ``LayeredModel.read_by_head``; where there is no head, it is handed on as the last of all results."""
        return self.tensors((len(self._results),), samples, lengths)[0]

    def build_head(self, shard: Shard, seed: int, device: torch.device | str = "cpu") -> StageBody:
        """See ``LayeredModel.build_head``."""
        head = self.graph.linear_head
        part = build_subgraph(self.captured, head, self.graph.operations[head[0]].inputs, (), device)
        stage = CapturedBody(part.module, (), tuple(getattr(torch, _type(one).dtype) for one in part.leaves))
        stage.head = tuple(self.graph.operations[n].name for n in head)
        stage.fill(self.values, seed, device, lambda _, whole: shard.cut(whole, 0))
        return stage

    def build_stage(
        self, layers: Sequence[int], seed: int, device: torch.device | str = "cpu", ends: BodyEnds | None = None
    ) -> StageBody:
        """Build the operations of these sub-graphs as one module."""
        arriving, leaving = ends or self.ends_in_chain(layers)
        graph = self.in_parts if self.slices > 1 else self.graph
        part = build_subgraph(
            replace(self.captured, graph=graph),
            self._operations(layers),
            [self._handed_on[r] for r in arriving],
            [self._handed_on[r] for r in leaving],
            device,
            self.build,
        )
        key_random_operations(part.module, self.sites)
        compute_meanwhile(part.module)
        if self.slices > 1:
            run_on_slices(part.module, self._flow)
        elif self.packed:
            attend_by_document(part.module)
        share_heads(part.module)
        statistics = learn_statistics(part.module, self.captured.values)
        stage = CapturedBody(
            part.module,
            tuple(self.fields[name][0] for name in part.inputs),
            tuple(getattr(torch, _type(operation).dtype) for operation in part.leaves),
            statistics,
        )
        for name in part.inputs:
            for dim in self.graph.sources[name].type.shape[1:2]:
                if isinstance(dim, str) and dim in graph.at_least:
                    stage.shortest[self.fields[name][0]] = graph.at_least[dim]
                if isinstance(dim, str) and dim in graph.at_most:
                    stage.longest[self.fields[name][0]] = graph.at_most[dim]
        if self.linear_head and layers[-1] == self.count - 1:
            stage.head = tuple(self.graph.operations[n].name for n in self.graph.linear_head)
        stage.fill(self.values, seed, device, self._cut)
        return stage

    def share_of(self, division: Division) -> CapturedModel:
        """Return the same model with the share of another rank, and experts in another order.

        Raises:
            SpecError: the order is not one of this model's experts.
        """
        other = copy(self)
        other.division, other.shards = division, in_order(self.shards, division.expert_orders)
        return other

    def slice_lengths(self, slices: int) -> Lengths:
        """See ``LayeredModel.slice_lengths``.

        Raises:
            CaptureError: an operation relates positions to one another other than by causal attention.
        """
        if not isinstance(self.task, NextToken) or self.batch_statistics:
            why = "the loss of a slice is known for the prediction of the next token alone"
            raise SpecError("parallel.slices", why, "use slices: 1, or a causal language model")
        if self.packed and self.drops_attention:
            why = "attention drops weights (attn_pdrop, attention_dropout), which parts of packed rows cannot do"
            raise SpecError("model.config", why, "use 0")
        assert self._flow is not None  # it raises
        names = {name for name, _ in self.fields.values()}
        length = equal_slices(self.positions, slices)
        if length < self.shortest_slice:
            least = self.shortest_slice
            why = f"slices have {length} positions, and below {least} the model's code takes another branch"
            raise SpecError("parallel.slices", why, "use fewer")
        return dict.fromkeys((*names, *self.task.reads), length)

    @cached_property
    def in_parts(self) -> OperationGraph:
        """The same operations where stages run parts of sequences."""
        if not self.packed:
            return self.graph
        made = given_positions(self.captured)
        if left := next((o for o in made.operations if o.mask is not None), None):
            why = "its mask is not known to be causal within documents and nothing more, as a window is"
            if self.positions > LONGEST:
                why = f"its mask is not compared with a causal one for rows of more than {LONGEST} tokens"
            raise CaptureError(f"operation {left.name} ({left.module})", why, "use parallel.context: 1")
        handed_on, _ = between_spans(made, self.sharding.starts)
        if more := set(handed_on) - set(self._handed_on):  # what has been copied for heads, in the middle of attention
            where = made.operations[min(more)].name
            raise CaptureError(where, "is cut off from the attention that reads it", "use parallel.context: 1")
        return made

    @cached_property
    def _flow(self) -> Flow:
        """Along which dimension of each result the sequence lies; see ``sequence_flow``."""
        graph = self.in_parts
        return sequence_flow(selected(graph, sorted(needed(graph))) if self.packed else graph)

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's share of a parameter."""
        return whole if self.division is None else self.division.cut(self.shards.get(name), whole)

    def _operations(self, layers: Sequence[int]) -> list[int]:
        return [n for i in layers for n in range(self.edges[i], self.edges[i + 1])]


class CapturedBody(StageBody):
    """The stage body of consecutive sub-graphs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        reads: tuple[str, ...],
        leaves: tuple[torch.dtype, ...],
        statistics: tuple[RunningStatistics, ...] = (),
    ) -> None:
        super().__init__()
        self.graph = graph
        self.arguments, self.leaves = reads, leaves
        self._statistics = statistics
        self.shortest: dict[str, int] = {}
        """Smallest lengths of raw inputs for which the captured branch of the model's code is valid."""
        self.longest: dict[str, int] = {}
        """Largest lengths of raw inputs for which the captured attention masks are valid."""
        self.head: tuple[str, ...] = ()
        """Names of the operations of the model's linear head, if it ends in one and the stage has its end."""

    def forward(self, arrived: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """Run the sub-graphs; see ``StageBody.forward``.

        Outputs are cast to the dtypes they were captured with, so that messages are the same under autocast.

        Raises:
            RunError: a micro-batch is shorter than the captured code allows, or longer than its attention masks do.
        """
        for name, least in self.shortest.items():
            if (length := inputs[name].shape[1]) < least:
                why = f"a micro-batch has length {length}, but below {least} the model's code takes another branch"
                raise RunError(name, why, f"set data.pad_to_multiple_of: {least}")
        for name, most in self.longest.items():
            if (length := inputs[name].shape[1]) > most:
                why = f"a micro-batch has length {length}, but the model was captured for {most} at most"
                raise RunError(name, why, f"shorten the sample, or start a run with model.sequence: {length}")
        outputs = self.graph(*arrived, *(inputs[name] for name in self.arguments))
        return tuple(y.to(dtype) for y, dtype in zip(outputs, self.leaves, strict=True))

    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the module's own names."""
        return dict(self.graph.named_parameters())

    @property
    def statistics(self) -> tuple[RunningStatistics, ...]:
        """Running statistics of the stage's batch norms."""
        return self._statistics

    def leave_head_to(self, project: Project) -> None:
        """See ``StageBody.leave_head_to``; what follows the product is left to what stands for the logits, too."""
        nodes = {node.name: node for node in self.graph.graph.nodes}
        product, *scales = (nodes[name] for name in self.head)
        setattr(self.graph, HEAD, project)
        with self.graph.graph.inserting_before(product):
            head = self.graph.graph.create_node("get_attr", HEAD)
        # Where its weight's gradient waits, the product is another function, and the queue comes first.
        read = product.args if product.target is aten.linear.default else product.args[1:]
        product.target, product.args = _projected, (head, *read)
        for node in scales:
            node.target, node.args = _scaled, (node.args[0], node.target, *node.args[1:])
        self.graph.recompile()

    def fill(
        self, values: StartValues, seed: int, device: torch.device | str, cut: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Allocate the parameters and set their start values; ``cut`` takes this process's share of each."""
        parameters, buffers = self.named(), dict(self.graph.named_buffers())
        for one in self.statistics:
            buffers |= one.buffers_by_name
        start = values.read(parameters, buffers, seed)
        aliases: dict[int, list[str]] = {}  # of parameters that are tied within a module that runs as it is
        for name, parameter in self.graph.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        for name, parameter in parameters.items():
            value = cut(name, start[name]).to(device, parameter.dtype, copy=True)
            filled = nn.Parameter(value, parameter.requires_grad)
            for alias in aliases[id(parameter)]:
                parent, _, leaf = alias.rpartition(".")
                self.graph.get_submodule(parent)._parameters[leaf] = filled
        for name, buffer in buffers.items():
            if name in start:
                buffer.copy_(start[name])


HEAD = "_head"
"""Attribute of a stage's graph that holds what makes what stands for the logits."""


def _projected(project: Project, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Unprojected:
    return project(x, weight, bias)


def _scaled(logits: Unprojected, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Unprojected:
    return logits.then(lambda whole: function(whole, *args, **kwargs))


def _type(operation: Operation) -> TensorType:
    assert operation.type is not None, f"{operation.name} is not a tensor and cannot cross a cut"
    return operation.type


aten = torch.ops.aten


def run_on_slices(module: fx.GraphModule, along: dict[str, int | None]) -> None:
    """Replace what depends on where a slice is, in place.

    Args:
        module: a stage, whose random operations are keyed.
        along: per operation, the dimension of its result along which the sequence lies (``graph.positions``).
    """
    module.graph.eliminate_dead_code()  # what made a mask that attention is not given any more
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = _attention
        elif node.target in (aten.arange.default, aten.arange.start):
            node.target = _positions
        elif node.target is keyed_dropout:
            node.kwargs = {**node.kwargs, "sequence_dim": along[node.name]}
    module.recompile()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return causal_attention(query, key, value, scale, enable_gqa, positions=positions)


def _positions(*args: Any, **kwargs: Any) -> Tensor:
    """``arange`` over the positions of what runs; it counts from 0 and ends with the sequence."""
    return positions_of(int(args[-1]), **{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
