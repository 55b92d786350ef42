"""One stage replica on one device: its layers, its parameters by plan-independent name, its forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raypipe.models import LayerPlan, join_tied
from raypipe.runtime.runner import Payload
from raypipe.runtime.split_backward import Closure, WeightQueue, defer_weight_gradients

Loss = Callable[[Tensor, Tensor], Tensor]
"""``(output, targets) -> sum of the token losses``."""


@dataclass(slots=True)
class Live:
    """What is kept of one micro-batch between its forward and its backward."""

    inputs: Payload
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


class StageModule(nn.Module):
    """Layers ``layers`` of the model, for one replica.

    A parameter is called ``<layer index>.<name>`` whatever the plan. Parameters tied inside the stage are one
    parameter under the group's first name; those tied across stages stay copies, kept equal by summed gradients.
    """

    def __init__(
        self, plan: LayerPlan, layers: Sequence[int], seed: int, dtype: torch.dtype, device: torch.device, split: bool
    ) -> None:
        super().__init__()
        self.indices = tuple(layers)
        self.layers = nn.ModuleList(plan.build(i, seed, dtype, device) for i in layers)
        join_tied(plan, dict(zip(self.indices, self.layers, strict=True)))
        self.queue = WeightQueue()
        self.split = split
        self.joint_names: list[str] = []
        """Parameters whose gradients B computes after all; norms, which do so on purpose, left out."""
        for index, layer in zip(self.indices, self.layers, strict=True):
            for name in defer_weight_gradients(layer, self.queue) if split else ():
                if not isinstance(layer.get_submodule(name.rpartition(".")[0]), nn.LayerNorm):
                    self.joint_names.append(f"{index}.{name}")
        self.named: dict[str, nn.Parameter] = {}
        for index, layer in zip(self.indices, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                if not any(parameter is known for known in self.named.values()):
                    self.named[f"{index}.{name}"] = parameter

    def forward(self, inputs: Payload) -> Payload:
        """Run the layers on one micro-batch."""
        (x,) = inputs
        for layer in self.layers:
            x = layer(x)
        return (x,)

    def run_backward(self, live: Live, gradients: Sequence[Tensor | None]) -> Payload:
        """Input gradients of one micro-batch; weight gradients too, unless they wait in ``live.closures``.

        ``gradients`` match ``live.outputs``. Returns one gradient per floating-point input.
        """
        pairs = [(y, g) for y, g in zip(live.outputs, gradients, strict=True) if y.requires_grad and g is not None]
        with self.queue.collect(live.closures):
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        back: list[Tensor] = []
        for x in live.inputs:
            if x.requires_grad:
                back.append(x.grad if x.grad is not None else torch.zeros_like(x))
                x.grad = None
        live.outputs = ()
        live.inputs = ()
        return tuple(back)

    @staticmethod
    def run_weight_gradients(live: Live) -> None:
        """Run what waits in ``live.closures``, last layer first."""
        with torch.no_grad():
            for closure in live.closures:
                closure()
        live.closures = []
