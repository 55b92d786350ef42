"""Trace a stage's forward and backward on one micro-batch into one graph of ATen operations, its joint graph.

Everything that a step changes is an input: parameters, buffers, what arrives, raw inputs, random keys, gradients of the
outputs. So one graph serves all steps, weight versions and micro-batches of the same shape. The forward is traced under
the run's autocast and the backward outside of it, as the executor runs them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from raypipe.compat.torch_private import (
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    _pytree,
    constrain_to_fx_strides,
    lowerings,
    make_fallback,
    make_fx,
    select_decomp_table,
)
from raypipe.models import Inputs, Task
from raypipe.models.keyed_random import with_keys
from raypipe.runtime.compiled.layout import TRACED_STEP, GraphLayout, RandomPlaces, TracedKeys
from raypipe.runtime.compiled.needs import Example
from raypipe.runtime.stage.stage import StageModule
from raypipe.tensor.group import TracedGroup, current_group, group_of_thread
from raypipe.tensor.traced_experts import tracing

aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result is its first argument's memory in another shape, which costs nothing to redo."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.is_view


def value(node: fx.Node) -> Tensor:
    """Return the fake tensor that a node stands for."""
    result: Tensor = node.meta["val"]
    return result


@dataclass(kw_only=True)
class JointGraph(GraphLayout):
    """A joint graph and the meaning of its inputs and outputs."""

    graph: fx.GraphModule
    fake: FakeTensorMode
    given: int
    """Number of inputs before ``casts``."""


class _Stage:
    """The stage as a function of flat tensors."""

    def __init__(
        self, module: StageModule, example: Example, places: RandomPlaces, device: torch.device | None
    ) -> None:
        self.module, self.example, self.places = module, example, places
        self.device = device or next((t.device for t in module.parameters()), torch.device("cpu"))
        self.parameters = list(dict(module.named_parameters()))
        self.buffers = list(dict(module.named_buffers()))
        self.inputs = sorted(example.inputs)
        self.statistics: list[int] = []

    def values(self) -> list[Tensor]:
        """Return fake tensors like the inputs, without the keys; call it under the fake mode."""
        module, example = self.module, self.example
        held = [*dict(module.named_parameters()).values(), *dict(module.named_buffers()).values()]
        made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device) for t in held]
        specs = [*example.arrived, *(example.inputs[name] for name in self.inputs)]
        return made + [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]

    def wants(self) -> list[bool]:
        """Return which of ``values`` get gradients; none in a validation."""
        takes = self.module.takes_gradient
        if self.example.segment is not None and self.example.segment.begin:
            takes = self.module.gives_between[self.example.segment.begin - 1]
        trained = [p.requires_grad for p in dict(self.module.named_parameters()).values()]
        wants = [*trained, *[False] * len(self.buffers), *takes, *[False] * len(self.inputs)]
        return wants if self.example.training else [False] * len(wants)

    def __call__(self, values: Sequence[Tensor], tables: Sequence[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward; return its outputs and the moments of batch norms."""
        module, example = self.module, self.example
        names = [*self.parameters, *self.buffers]
        held = dict(zip(names, values, strict=False))
        rest = list(values[len(names) :])
        arrived = tuple(rest[: len(example.arrived)])
        inputs = dict(zip(self.inputs, rest[len(example.arrived) :], strict=True))
        given = (arrived, inputs) if example.segment is None else (arrived, inputs, example.segment)
        keys = TracedKeys(example.samples, self.places, tables, example.training)
        queue = module.queue
        before, queue.only = queue.only, frozenset()  # no weight gradient is deferred by hand
        try:
            with with_keys(keys), self._autocast():
                outputs = list(torch.func.functional_call(module, held, given))
                if example.loss is not None:
                    outputs = self._scored(example.loss, outputs[0], inputs)
        finally:
            queue.only = before
        taken = [one.take(TRACED_STEP, 0) for one in module.statistics]
        self.statistics = [i for i, moments in enumerate(taken) if moments is not None]
        return outputs, [moments for moments in taken if moments is not None]

    def _scored(self, task: Task, made: Tensor, inputs: Inputs) -> list[Tensor]:
        """Return the loss of what the last stage makes; in a validation with what else is asked of it."""
        loss = task.loss(made, inputs)
        if self.example.training:
            return [loss]
        return [made, loss, *([task.sums_of_figures(made, inputs)] if task.figures else ())]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.example.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.example.autocast, cache_enabled=False)


def trace(module: StageModule, example: Example, device: torch.device | None = None) -> JointGraph:
    """Trace a stage, or a segment of it; of a validation the forward alone, in which nothing is dropped.

    With ``device``, it is traced as if it were there, without any memory of it; ``aim`` it there first.

    Nothing of the stage changes, and no memory for its values is allocated. Of a validation, the outputs of the last
    stage are the prediction, the loss, and the task's figures where it has some.

    Raises:
        Exception: whatever torch raises for operations that it cannot trace.
        ValueError: nothing here gets a gradient, or a validation draws random numbers.
    """
    size = current_group().size
    with tracing(), group_of_thread(TracedGroup(size)) if size > 1 else nullcontext():
        return _trace(module, example, device)


def aim(module: StageModule, device: torch.device) -> None:
    """Have the graphs of a stage make their new tensors on a device, wherever its parameters are."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args, node.kwargs = fx.node.map_aggregate(
                    (node.args, node.kwargs), lambda one: device if isinstance(one, torch.device) else one
                )
            part.recompile()


def _trace(module: StageModule, example: Example, device: torch.device | None) -> JointGraph:
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # without one, torch caches no graph
    places = RandomPlaces()
    stage = _Stage(module, example, places, device)
    wants = stage.wants()
    with fake, torch.set_grad_enabled(example.training):
        values = stage.values()
        outputs, _moments = stage(_leaves(values, wants), None)
        tangents = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in outputs if y.requires_grad]
        count = {True: example.samples, False: 1}
        tables = [
            torch.empty(len(sites), count[own], 2, dtype=torch.int32, device=stage.device)
            for sites, own in ((places.own, True), (places.shared, False))
            if sites
        ]
    if example.training and not tangents:
        raise ValueError("nothing in it gets a gradient")
    if tables and not example.training:
        raise ValueError("it draws random numbers in a validation")
    differentiable = tuple(y.requires_grad for y in outputs)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
        leaves = _leaves(primals[: len(values)], wants)
        with torch.set_grad_enabled(example.training):
            made, seen = stage(leaves, primals[len(values) :])
        ends = [y for y in made if y.requires_grad]
        wanted = [leaf for leaf, want in zip(leaves, wants, strict=True) if want]
        gradients = torch.autograd.grad(ends, wanted, tangents, allow_unused=True) if ends else ()
        return [*(y.detach() for y in made), *seen, *gradients]

    rounds = keeps_rounding(module.parameters())
    with fake:
        graph = _traced(joint, [*values, *tables], tangents, rounds)
    n = len(stage.parameters)
    takes = tuple(wants[n + len(stage.buffers) : n + len(stage.buffers) + len(example.arrived)])
    return JointGraph(
        graph=graph,
        fake=fake,
        given=len(values) + len(tables),
        parameters=stage.parameters,
        buffers=stage.buffers,
        inputs=stage.inputs,
        places=places,
        trained=[i for i in range(n) if wants[i]],
        takes_gradient=takes,
        differentiable=differentiable,
        statistics=list(stage.statistics),
        casts=[],
    )


def _leaves(values: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor]:
    return [x.detach().requires_grad_() if want else x for x, want in zip(values, wants, strict=True)]


def _traced(function: Any, primals: list[Tensor], tangents: list[Tensor], rounds: bool) -> fx.GraphModule:
    """Trace a joint function into a graph without operations in place; ``rounds``: see ``lower_precision``."""
    table = undecomposed(select_decomp_table()) if rounds else select_decomp_table()
    graph: fx.GraphModule = make_fx(function, decomposition_table=table)(primals, tangents)
    if any(_in_place(node) for node in graph.graph.nodes):

        def again(primals: list[Tensor], tangents: list[Tensor]) -> Any:
            return graph(primals, tangents)

        functional = torch.func.functionalize(again, remove="mutations")
        graph = make_fx(functional, decomposition_table=table)(primals, tangents)
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    if rounds:
        fall_back(graph.graph)
    return graph


def _in_place(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


# Rewrites of a joint graph before it is cut: what hides that its parts run at different times is taken apart.

CAST = torch.ops.prims.convert_element_type.default


def prepare(joint: JointGraph) -> None:
    """Make all rewrites, in place."""
    _drop_identities(joint.graph.graph)
    _lift_casts(joint)
    _split_convolutions(joint.graph.graph)
    joint.graph.graph.eliminate_dead_code()
    joint.graph.graph.lint()
    joint.graph.recompile()


def _drop_identities(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default, torch.ops.raypipe.copy_to_group.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _lift_casts(joint: JointGraph) -> None:
    """Make casts of whole parameters inputs, so that the micro-batches of a step share them (``executor.casts``)."""
    graph = joint.graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    made: dict[tuple[int, torch.dtype], fx.Node] = {}
    last = placeholders[joint.given - 1]
    for number in range(len(joint.parameters)):
        for node in [user for user in placeholders[number].users if user.target is CAST]:
            dtype = node.args[1]
            if (number, dtype) not in made:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"primals_{joint.given + len(made) + 1}")
                last.meta = dict(node.meta)
                made[number, dtype] = last
                joint.casts.append((number, dtype))
            node.replace_all_uses_with(made[number, dtype])
            graph.erase_node(node)


def _split_convolutions(graph: fx.Graph) -> None:
    """Compute a convolution's gradients one by one: that of its weight may wait, whoever needs the others."""
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        if FALLS_BACK not in node.meta:  # else its sum has to round as PyTorch's kernel does
            _sum_bias(graph, node)
        *args, mask = node.args
        if not (mask[0] and any(mask[1:])):
            continue
        values = node.meta["val"]
        with graph.inserting_after(node):
            weights = graph.call_function(node.target, (*args, [False, *mask[1:]]))
        weights.meta = {**node.meta, "val": (None, *values[1:])}
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] != 0:
                user.args = (weights, user.args[1])
        node.args = (*args, [True, False, False])
        node.meta = {**node.meta, "val": (values[0], None, None)}


def _sum_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Compute the gradient of a convolution's bias as the sum that it is, rather than with that of the weight."""
    arguments: tuple[Any, ...] = node.args
    *args, mask = arguments
    if not mask[2]:
        return
    gradient, values = args[0], node.meta["val"]
    with graph.inserting_before(node):
        dims = [0, *range(2, value(gradient).dim())]
        made = graph.call_function(aten.sum.dim_IntList, (gradient, dims))
    made.meta = {**node.meta, "val": values[2]}
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 2:
            user.replace_all_uses_with(made)
            graph.erase_node(user)
    node.args = (*args, [*mask[:2], False])
    node.meta = {**node.meta, "val": (*values[:2], None)}


# Operations in a lower precision than the parameters': norms and routers that a float64 model computes in float32.
#
# Their results decide after seven digits what follows, so they have to round as in eager mode: they stay PyTorch's own
# operations, undecomposed, and the compiler calls PyTorch's kernels for them. Casts and views are exact either way.

EXACT = (aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default)
FALLS_BACK = "should_fallback"
"""Inductor calls PyTorch's kernel for a node whose ``meta`` has this key."""


def keeps_rounding(parameters: Iterable[Tensor]) -> bool:
    """Return whether what these parameters compute in a lower precision is to round as in eager mode."""
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    return dtypes == {torch.float64}


def undecomposed(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a decomposition table that leaves operations on tensors of a lower precision than float64 whole.

    But for casts and views, which are exact either way; of some views Inductor knows nothing but the decomposition.
    """

    def exact(target: Any) -> bool:
        return target in EXACT or (isinstance(target, OpOverload) and target.is_view)

    return {target: decompose if exact(target) else _unless_lower(decompose) for target, decompose in table.items()}


def fall_back(graph: fx.Graph) -> int:
    """Have PyTorch's kernels compute what is in a lower precision than float64; return the number of nodes."""
    count = 0
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or node.target in EXACT or is_view(node):
            continue
        if any(_lower(one.meta.get("val")) for one in (node, *node.all_input_nodes)) and node.all_input_nodes:
            node.meta[FALLS_BACK] = True
            count += 1
    return count


def register_fallbacks(graph: fx.Graph) -> None:
    """Make the operations that are to fall back known to Inductor, which else expects them to be decomposed."""
    nodes = (node for node in graph.nodes if node.op == "call_function")  # inputs have the meta of what they were
    for target in {node.target for node in nodes if FALLS_BACK in node.meta}:
        if target not in lowerings:
            make_fallback(target, constrain_to_fx_strides, warn=False, override_decomp=True)


def _unless_lower(decompose: Callable[..., Any]) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if _lower((args, kwargs)) else decompose(*args, **kwargs)

    return decomposed


def _lower(values: Any) -> bool:
    tensors = (x for x in _pytree.tree_leaves(values) if isinstance(x, Tensor))
    return any(x.is_floating_point() and x.dtype != torch.float64 for x in tensors)
