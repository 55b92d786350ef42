"""One stage replica on one device: its layers, its parameters under plan-independent names, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from raypipe.graph.liveness import between_parts
from raypipe.models import BodyEnds, Chain, CutTensor, Inputs, LayeredModel, StageBody
from raypipe.runtime.backward.chunked_loss import ChunkedHead
from raypipe.runtime.backward.segments import RecomputeBoundaries, Segment, parts_of, segments_of
from raypipe.runtime.backward.split_backward import Closure, WeightQueue, defer_weight_gradients
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.transport.channel import Payload
from raypipe.tensor.experts import ExpertsParallel
from raypipe.tensor.traced_experts import hold


class OwnGraph(Protocol):
    """The link from a forward to its backward where that is no graph of autograd's that ends in the outputs."""

    def backward(
        self, stage: StageModule, inputs: Payload, gradients: Sequence[Tensor], turns: Alternation | None
    ) -> Payload:
        """See ``StageModule.run_backward``; ``inputs``: the received activations."""


@dataclass(slots=True)
class HalfBatch:
    """One half of a micro-batch whose two halves' forwards alternated."""

    inputs: Payload
    """This half's rows of the received activations; leaves of the half's graph."""
    outputs: Payload


@dataclass(slots=True)
class HalfBatches:
    """Both halves of a micro-batch, each with a graph of its own."""

    first: HalfBatch
    second: HalfBatch

    def backward(
        self, stage: StageModule, inputs: Payload, gradients: Sequence[Tensor], turns: Alternation | None
    ) -> Payload:
        """See OwnGraph.backward."""
        assert turns is not None
        a, b, (for_a, for_b) = self.first, self.second, unstacked(tuple(gradients), 2)
        made = turns.run(
            lambda: stage.backward(a.inputs, a.outputs, for_a),
            lambda: stage.backward(b.inputs, b.outputs, for_b),
        )
        return stacked(made)


@dataclass(slots=True)
class MicrobatchState:
    """The tensors that a stage keeps of one micro-batch between its forward and its backward."""

    inputs: Payload
    """Activations received from the stages before."""
    outputs: Payload
    """Outputs of the forward; empty until R has recomputed them."""
    weights: dict[str, Tensor] | None = None
    """The weight version that the forward ran on, where a schedule keeps several."""
    closures: list[Closure] = field(default_factory=list)
    """Weight gradients deferred to W."""
    ran: bool = False
    """Whether the input gradient has been computed."""
    back: Payload | None = None
    """The input gradient, kept for B where W ran first."""
    graph: OwnGraph | None = None
    """What the backward uses where ``outputs`` have no graph: that of two halves, or of a compiled stage."""
    boundaries: RecomputeBoundaries | None = None
    """Tensors between segments, if only some of the layers are recomputed."""


class StageModule(nn.Module):
    """Layers ``layers`` of the model, for one replica.

    A parameter has the same name in every plan. Parameters tied inside the stage are one parameter under the group's
    first name; parameters tied across stages are copies, which summing their gradients keeps equal.

    Args:
        model: the whole model as a list of layers.
        layers: numbers of the layers of this stage, in order.
        seed: of the parameters' initial values.
        device: where the parameters are.
        split: whether to defer weight gradients, for W tasks.
        recomputed: layers that an R task recomputes; None for all of them.
        finest: whether ``recomputed`` may change later (``set_recomputed``).
        ends: the results that it receives and sends on; None for consecutive layers, as a stage of a chain.
        freed: whether its weights are freed after a backward (ZeRO level 3), so that W cannot read them.
    """

    def __init__(
        self,
        model: LayeredModel,
        layers: Sequence[int],
        seed: int,
        device: torch.device,
        split: bool,
        recomputed: Collection[int] | None = None,
        finest: bool = False,
        ends: BodyEnds | None = None,
        freed: bool = False,
    ) -> None:
        super().__init__()
        ends = ends or model.ends_in_chain(layers)
        self.ends = ends
        self.layers = tuple(layers)
        """Numbers of the layers that this stage holds."""
        self.parts = parts_of(layers, recomputed, finest)
        single = len(self.parts) == 1
        self.body: StageBody = (
            model.build_stage(layers, seed, device, ends) if single else Chain(model, self.parts, seed, device, ends)
        )
        self.between = between_parts(model.results, self.parts, *ends)
        """Per part but the last, the results that it passes on to the next."""
        self.gives_between = [tuple(t.differentiable for t in model.tensors(some, 1)) for some in self.between]
        """Per part but the last, and per tensor that it passes on, whether a gradient comes back."""
        self.set_recomputed(recomputed)
        self.named = self.body.named()
        shards = {name: model.shard_of(name, layers) for name in self.named}
        self.shards = {name: shard for name, shard in shards.items() if shard is not None}
        """How the parameters of which this stage holds a share are divided, by name."""
        self.experts = frozenset(name for name, cut in self.shards.items() if cut.axis == "experts")
        """Names of those that copies divide."""
        names = {id(p): name for name, p in self.named.items()}
        self.routed = {
            names[id(next(module.parameters()))].rpartition(".")[0]: module
            for module in self.body.modules()
            if isinstance(module, ExpertsParallel)
        }
        """The modules of divided experts by their path in the model."""
        for path, experts in self.routed.items():
            hold(path, experts)
            experts.order = next(cut.order for name, cut in self.shards.items() if name.rpartition(".")[0] == path)
        self.trained = {name: p for name, p in self.named.items() if p.requires_grad}
        """The parameters that the optimizer updates; the others are frozen."""
        last = layers[-1] == model.count - 1
        self.sends_on = not last
        """Whether its outputs go to other stages; those of the last stage give the loss instead."""
        self.reads = model.reads(layers) | (model.task.reads if last else frozenset())
        """Names of the raw inputs that the stage reads."""
        self.takes_gradient = tuple(t.differentiable for t in model.tensors(ends.arriving, 1))
        """Per received tensor, whether its gradient is sent back."""
        self.gives_gradient = tuple(t.differentiable for t in model.tensors(ends.leaving, 1)) or (True,)
        """Per output, whether a gradient is received for it; the last stage's output is the loss."""
        stacks = all(can_stack(model.tensors(some, 1), model.tensors(some, 2)) for some in ends)
        self.stacks = stacks and not model.batch_statistics
        """Whether several micro-batches can be stacked into one, and one divided into two halves."""
        self.statistics = self.body.statistics
        """Running statistics, e.g. of batch norm."""
        self.splits = self.defers = split
        """Whether weight gradients are deferred; those of a compiled stage always are."""
        self.queue = WeightQueue()
        self.joint_names: list[str] = []
        """With ``split``, parameters whose gradients B computes all the same. Vectors are not listed, because their
        gradients cost next to nothing."""
        if split:
            names = {id(parameter): name for name, parameter in self.named.items()}
            joint = [self.body.get_parameter(path) for path in defer_weight_gradients(self.body, self.queue)]
            self.joint_names += [names[id(parameter)] for parameter in joint if parameter.dim() > 1]
        if layers[-1] in model.heads:
            tokens = model.loss_chunk or sys.maxsize
            self.body.leave_head_to(partial(ChunkedHead, tokens=tokens, queue=self.queue, waits=split and not freed))

    def set_recomputed(self, recomputed: Collection[int] | None) -> None:
        """Choose the layers that R recomputes: any layers, if the stage was built with ``finest``; None for all."""
        self.segments = segments_of(self.parts, recomputed, self.gives_between)
        """Runs of layers that are either kept or recomputed, in order."""

    @property
    def trained_by_block(self) -> list[list[nn.Parameter]]:
        """The trained parameters of each of the body's ``blocks`` that has any; one of several is the first one's."""
        left = {id(p): p for p in self.trained.values()}
        result = [[left.pop(id(p)) for p in block.parameters() if id(p) in left] for block in self.body.blocks]
        return [some for some in result if some]

    @property
    def recomputes_whole(self) -> bool:
        """Return whether an R task recomputes the whole stage."""
        return len(self.segments) == 1 and self.segments[0].recomputed

    def forward(self, arrived: Payload, inputs: Inputs, segment: Segment | None = None) -> Payload:
        """Run all layers, or those of one segment, on one micro-batch.

        ``arrived`` are the tensors received from earlier stages (or the segment before), ``inputs`` the raw inputs.
        """
        outputs: Payload = (
            self.body(arrived, inputs) if segment is None else self.body(arrived, inputs, segment.begin, segment.end)
        )
        return outputs

    def track(self, arrived: Payload) -> None:
        """Require gradients for the received tensors whose gradient is sent back."""
        for x, wanted in zip(arrived, self.takes_gradient, strict=True):
            if wanted:
                x.requires_grad_()

    def run_backward(
        self, saved: MicrobatchState, gradients: Sequence[Tensor], turns: Alternation | None = None, whole: bool = False
    ) -> Payload:
        """Compute the input gradients of one micro-batch, and all weight gradients that are not deferred.

        Args:
            saved: the micro-batch's state; deferred weight gradients are left in its ``closures``.
            gradients: one per differentiable tensor among ``saved.outputs``.
            turns: alternates the two halves, where the forward ran in halves.
            whole: whether the same task computes the weight gradients; those of a compiled stage are then not split.

        Returns:
            One gradient per differentiable tensor that the stage received.
        """
        self.queue.whole = whole
        with self.queue.collect(saved.closures):
            if saved.graph is None:
                back = self.backward(saved.inputs, saved.outputs, gradients, saved.boundaries)
            else:
                back = saved.graph.backward(self, saved.inputs, gradients, turns)
        saved.outputs = saved.inputs = ()
        saved.graph = saved.boundaries = None
        return back

    def backward(
        self,
        inputs: Payload,
        outputs: Payload,
        gradients: Sequence[Tensor],
        boundaries: RecomputeBoundaries | None = None,
    ) -> Payload:
        """Run autograd's backward; arguments and result are those of ``run_backward``."""
        ends = [y for y, wanted in zip(outputs, self.gives_gradient, strict=True) if wanted]
        pairs = [(y, g) for y, g in zip(ends, gradients, strict=True) if y.requires_grad]
        if pairs:  # empty where all parameters so far are frozen
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
            if boundaries is not None:
                boundaries.backward()
        back: list[Tensor] = []
        for x in inputs:
            if x.requires_grad:
                back.append(x.grad if x.grad is not None else torch.zeros_like(x))
                x.grad = None
        return tuple(back)

    def release(self) -> None:
        """Free the memory of the parameters and their gradients; the module cannot be used afterwards.

        Layers with deferred weight gradients are in reference cycles, and a worker freezes its objects for the garbage
        collector. Without this, every stage that a worker has ever held would stay in memory.
        """
        for parameter in self.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    @staticmethod
    def run_weight_gradients(saved: MicrobatchState, computed: Callable[[Tensor], None] | None = None) -> None:
        """Compute the deferred weight gradients in ``saved.closures``, from the last layer to the first.

        ``computed`` is called with a parameter each time after something was added to its gradient.
        """
        with torch.no_grad():
            for closure in saved.closures:
                closure.compute()
                if computed is not None:
                    for parameter in closure.parameters:
                        computed(parameter)
        saved.closures = []


def can_stack(one: Sequence[CutTensor], two: Sequence[CutTensor]) -> bool:
    """Return whether the tensors that cross a cut scale with the batch: for ``two`` samples, dimension 0 doubles."""
    return all(a.shape and b.shape == (2 * a.shape[0], *a.shape[1:]) for a, b in zip(one, two, strict=True))


def stacked(payloads: Sequence[Payload]) -> Payload:
    """Concatenate the micro-batches' tensors along dimension 0."""
    return payloads[0] if len(payloads) == 1 else tuple(torch.cat(parts) for parts in zip(*payloads, strict=True))


def stacked_inputs(inputs: Sequence[Inputs]) -> Inputs:
    """Concatenate the micro-batches' raw inputs along dimension 0."""
    if len(inputs) == 1:
        return inputs[0]
    return {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}


def unstacked(payload: Payload, count: int) -> list[Payload]:
    """Split stacked tensors into each micro-batch's rows; a scalar (a loss sum) is repeated for each."""
    if count == 1:
        return [payload]
    parts = [y.chunk(count) if y.dim() else (y,) * count for y in payload]
    return [tuple(rows) for rows in zip(*parts, strict=True)]
