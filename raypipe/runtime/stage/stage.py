"""One stage replica on one device: its layers, its parameters by plan-independent name, its forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raypipe.models import Chain, Inputs, LayeredModel, StageBody
from raypipe.runtime.backward.segments import RecomputeBoundaries, Segment, parts_of, segments_of
from raypipe.runtime.backward.split_backward import Closure, WeightQueue, defer_weight_gradients
from raypipe.runtime.backward.stack import can_stack, stacked, unstacked
from raypipe.runtime.runner import Payload
from raypipe.runtime.stage.alternate import Alternation


@dataclass(slots=True)
class HalfBatch:
    """Half of a micro-batch, whose forward ran in turns with the other one's."""

    inputs: Payload
    """Leaves: what arrived, these rows of it."""
    outputs: Payload


@dataclass(slots=True)
class MicrobatchState:
    """What is kept of one micro-batch between its forward and its backward."""

    inputs: Payload
    """What arrived from the stage before."""
    outputs: Payload
    """Empty while a recompute still has to make them."""
    weights: dict[str, Tensor] | None = None
    """The weight version its forward ran on, where a schedule keeps several."""
    closures: list[Closure] = field(default_factory=list)
    """Weight gradients that wait for W."""
    ran: bool = False
    """The input gradient has been computed."""
    back: Payload | None = None
    """The input gradient, kept for B where W came first."""
    halves: tuple[HalfBatch, HalfBatch] | None = None
    """Where the forward ran in halves: what their backwards need, instead of ``outputs``, which are only values."""
    boundaries: RecomputeBoundaries | None = None
    """Where only some of its layers are computed again."""


class StageModule(nn.Module):
    """Layers ``layers`` of the model, for one replica.

    A parameter's name is the same whatever the plan. Parameters tied inside the stage are one parameter under the
    group's first name; those tied across stages stay copies, kept equal by summed gradients.

    ``recomputed`` are the layers that an R of this stage computes again; None for all of them. ``finest``: they may
    change.
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
    ) -> None:
        super().__init__()
        self.layers = tuple(layers)
        """Numbers of the layers it holds."""
        self.parts = parts_of(layers, recomputed, finest)
        whole = len(self.parts) == 1
        self.body: StageBody = (
            model.build_stage(layers, seed, device) if whole else Chain(model, self.parts, seed, device)
        )
        self._gives = [tuple(t.differentiable for t in model.crossing(part[-1], 1)) for part in self.parts[:-1]]
        self.set_recomputed(recomputed)
        self.named = self.body.named()
        self.shards = {name: model.shards[name] for name in self.named if name in model.shards}
        """How the parameters are cut that this is one member's share of."""
        self.trained = {name: p for name, p in self.named.items() if p.requires_grad}
        """Those that the optimizer changes; the others are frozen."""
        last = layers[-1] == model.count - 1
        self.reads = model.reads(layers) | (model.task.reads if last else frozenset())
        """Raw inputs it needs."""
        arriving = model.crossing(layers[0] - 1, 1) if layers[0] else ()
        self.takes_gradient = tuple(t.differentiable for t in arriving)
        """Per tensor that arrives, whether its gradient goes back."""
        leaving = () if last else model.crossing(layers[-1], 1)
        self.gives_gradient = tuple(t.differentiable for t in leaving) or (True,)
        """Per output, whether a gradient comes for it; the last stage's output is the loss."""
        borders = [layers[0] - 1] * bool(layers[0]) + [layers[-1]] * (not last)
        stacks = all(can_stack(model.crossing(i, 1), model.crossing(i, 2)) for i in borders)
        self.stacks = stacks and not model.batch_statistics
        """Several micro-batches can run as one, or one as two halves."""
        self.statistics = self.body.statistics
        """What learns without gradients."""
        self.queue = WeightQueue()
        self.joint_names: list[str] = []
        """Parameters whose gradients B computes after all; vectors left out: their gradients cost next to nothing."""
        if split:
            names = {id(parameter): name for name, parameter in self.named.items()}
            joint = [self.body.get_parameter(path) for path in defer_weight_gradients(self.body, self.queue)]
            self.joint_names += [names[id(parameter)] for parameter in joint if parameter.dim() > 1]

    def set_recomputed(self, recomputed: Collection[int] | None) -> None:
        """Change what an R computes again: any layers of a stage that was made the finest way."""
        self.segments = segments_of(self.parts, recomputed, self._gives)
        """Runs of layers that are kept or computed again, in order."""

    @property
    def recomputes_whole(self) -> bool:
        """An R computes all of it again."""
        return len(self.segments) == 1 and self.segments[0].recomputed

    def forward(self, arrived: Payload, inputs: Inputs, segment: Segment | None = None) -> Payload:
        """Run the layers on one micro-batch, or a segment of them."""
        outputs: Payload = (
            self.body(arrived, inputs) if segment is None else self.body(arrived, inputs, segment.begin, segment.end)
        )
        return outputs

    def track(self, arrived: Payload) -> None:
        """Have autograd note what is done with what arrived, where its gradient goes back."""
        for x, wanted in zip(arrived, self.takes_gradient, strict=True):
            if wanted:
                x.requires_grad_()

    def run_backward(
        self, saved: MicrobatchState, gradients: Sequence[Tensor], turns: Alternation | None = None
    ) -> Payload:
        """Input gradients of one micro-batch; weight gradients too, unless they wait in ``saved.closures``.

        ``gradients`` match the differentiable ones among ``saved.outputs``. Returns one gradient per differentiable
        tensor that arrived. Halves take ``turns``.
        """
        with self.queue.collect(saved.closures):
            if saved.halves is None:
                back = self._backward(saved.inputs, saved.outputs, gradients, saved.boundaries)
            else:
                assert turns is not None
                (a, b), (for_a, for_b) = saved.halves, unstacked(tuple(gradients), 2)
                made = turns.run(
                    lambda: self._backward(a.inputs, a.outputs, for_a),
                    lambda: self._backward(b.inputs, b.outputs, for_b),
                )
                back = stacked(made)
        saved.outputs = saved.inputs = ()
        saved.halves = saved.boundaries = None
        return back

    def _backward(
        self,
        inputs: Payload,
        outputs: Payload,
        gradients: Sequence[Tensor],
        boundaries: RecomputeBoundaries | None = None,
    ) -> Payload:
        ends = [y for y, wanted in zip(outputs, self.gives_gradient, strict=True) if wanted]
        pairs = [(y, g) for y, g in zip(ends, gradients, strict=True) if y.requires_grad]
        if pairs:  # nothing is, where all parameters so far are frozen
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
            if boundaries is not None:
                boundaries.backward()
        back: list[Tensor] = []
        for x in inputs:
            if x.requires_grad:
                back.append(x.grad if x.grad is not None else torch.zeros_like(x))
                x.grad = None
        return tuple(back)

    def give_up(self) -> None:
        """Free the memory of the parameters and their gradients, for good.

        A layer whose weight gradient waits refers to itself, and what an actor has built is hidden from the garbage
        collector: without this, every stage that an actor has ever held would stay in memory.
        """
        for parameter in self.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    @staticmethod
    def run_weight_gradients(saved: MicrobatchState) -> None:
        """Run what waits in ``saved.closures``, last layer first."""
        with torch.no_grad():
            for closure in saved.closures:
                closure()
        saved.closures = []
