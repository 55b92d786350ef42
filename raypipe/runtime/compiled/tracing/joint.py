"""Trace a stage's forward and backward on one micro-batch into one graph of ATen operations, its joint graph.

Everything that a step changes is an input: parameters, buffers, what arrives, raw inputs, random keys, gradients of the
outputs. So one graph serves all steps, weight versions and micro-batches of the same shape. The forward is traced under
the run's autocast and the backward outside of it, as the executor runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import lowering  # noqa: F401 - the decomposition of max pooling takes it to be imported
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from raypipe.models import Inputs, Task
from raypipe.models.keyed_random import with_keys
from raypipe.runtime.compiled.layout import GraphLayout
from raypipe.runtime.compiled.needs import Example
from raypipe.runtime.compiled.traced_keys import TRACED_STEP, RandomPlaces, TracedKeys
from raypipe.runtime.compiled.tracing.lower_precision import fall_back, keeps_rounding, undecomposed
from raypipe.runtime.stage.stage import StageModule


@dataclass(kw_only=True)
class JointGraph(GraphLayout):
    """A joint graph and the meaning of its inputs and outputs."""

    graph: fx.GraphModule
    fake: FakeTensorMode
    given: int
    """Number of inputs before ``casts``."""


class _Stage:
    """The stage as a function of flat tensors."""

    def __init__(self, module: StageModule, example: Example, places: RandomPlaces) -> None:
        self.module, self.example, self.places = module, example, places
        self.parameters = list(dict(module.named_parameters()))
        self.buffers = list(dict(module.named_buffers()))
        self.inputs = sorted(example.inputs)
        self.statistics: list[int] = []

    def values(self) -> list[Tensor]:
        """Return fake tensors like the inputs, without the keys; call it under the fake mode."""
        module, example = self.module, self.example
        held = [*dict(module.named_parameters()).values(), *dict(module.named_buffers()).values()]
        device = held[0].device if held else torch.device("cpu")
        made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in held]
        specs = [*example.arrived, *(example.inputs[name] for name in self.inputs)]
        return made + [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]

    def wants(self) -> list[bool]:
        """Return which of ``values`` get gradients."""
        takes = self.module.takes_gradient
        if self.example.segment is not None and self.example.segment.begin:
            takes = self.module.gives_between[self.example.segment.begin - 1]
        trained = [p.requires_grad for p in dict(self.module.named_parameters()).values()]
        return [*trained, *[False] * len(self.buffers), *takes, *[False] * len(self.inputs)]

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
            with with_keys(keys), self._autocast(values[0].device if values else torch.device("cpu")):
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

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.example.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.example.autocast, cache_enabled=False)


def trace(module: StageModule, example: Example) -> JointGraph:
    """Trace a stage, or a segment of it.

    Nothing of the stage changes, and no memory for its values is allocated.

    Raises:
        Exception: whatever torch raises for operations that it cannot trace.
        ValueError: nothing here gets a gradient.
    """
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # without one, torch caches no graph
    places = RandomPlaces()
    stage = _Stage(module, example, places)
    wants = stage.wants()
    with fake, torch.enable_grad():
        values = stage.values()
        outputs, _moments = stage(_leaves(values, wants), None)
        tangents = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in outputs if y.requires_grad]
        count = {True: example.samples, False: 1}
        tables = [
            torch.empty(len(sites), count[own], 2, dtype=torch.int32, device=values[0].device)
            for sites, own in ((places.own, True), (places.shared, False))
            if sites
        ]
    if not tangents:
        raise ValueError("nothing in it gets a gradient")
    differentiable = tuple(y.requires_grad for y in outputs)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
        leaves = _leaves(primals[: len(values)], wants)
        with torch.enable_grad():
            made, seen = stage(leaves, primals[len(values) :])
        ends = [y for y in made if y.requires_grad]
        wanted = [leaf for leaf, want in zip(leaves, wants, strict=True) if want]
        gradients = torch.autograd.grad(ends, wanted, tangents, allow_unused=True)
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


def trace_validation(module: StageModule, example: Example) -> JointGraph:
    """Trace the forward of a stage in a validation: nothing is dropped, and there is no backward.

    On the last stage its outputs are the prediction, the loss, and the task's figures where it has some.

    Raises:
        Exception: whatever torch raises for operations that it cannot trace.
        ValueError: it draws random numbers all the same.
    """
    fake, places = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True), RandomPlaces()
    stage = _Stage(module, example, places)
    rounds = keeps_rounding(module.parameters())

    def forward(primals: list[Tensor], _: list[Tensor]) -> list[Tensor]:
        return [y.detach() for y in stage(primals, None)[0]]

    with fake, torch.no_grad():
        values = stage.values()
        graph = _traced(forward, values, [], rounds)
    if places.own or places.shared:
        raise ValueError("it draws random numbers in a validation")
    outputs = len(next(iter(reversed(graph.graph.nodes))).args[0])
    return JointGraph(
        graph=graph,
        fake=fake,
        given=len(values),
        parameters=stage.parameters,
        buffers=stage.buffers,
        inputs=stage.inputs,
        places=places,
        trained=[],
        takes_gradient=(False,) * len(example.arrived),
        differentiable=(False,) * outputs,
        statistics=[],
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
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
