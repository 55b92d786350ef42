"""A division of the devices, as a certificate knows it: its layers, its devices and its micro-batches, as numbers.

Nothing here depends on where the layers are cut, on which device a stage is, or on the order of tasks: bounds on these
numbers hold for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

Resource = Literal["compute", "link", "memory", "barrier"]
"""What keeps a step from being shorter. ``link``: messages between stages. ``barrier``: that every device waits for the
others between two steps, so that the pipeline fills anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Seconds of each layer's tasks for one micro-batch on one kind of device."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    """The way back through a layer: its B, or the whole backward where that is shorter."""
    backward: tuple[float, ...]
    """Both gradients, by whichever way is shorter: B and W, or jointly."""
    recompute: tuple[float, ...]
    update: tuple[float, ...]
    """Its weights' update, once a step."""
    overhead: float = 0.0
    """Of each task, besides its layers; see ``Instance.tasks``."""

    @staticmethod
    def of(kinds: Sequence[Kind], which: Callable[[Iterable[float]], float]) -> Kind:
        """Each time of several kinds, joined by ``min`` or ``max``."""
        names = ("forward", "input_grad", "backward", "recompute", "update")
        each = {name: tuple(map(which, zip(*(getattr(kind, name) for kind in kinds), strict=True))) for name in names}
        return Kind(**each, overhead=which(kind.overhead for kind in kinds))

    @property
    def work(self) -> tuple[float, ...]:
        """Forward and backward of each layer."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))


@dataclass(frozen=True)
class Instance:
    """The model on one data-parallel copy's devices. Bytes are those of one device, times seconds."""

    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    """Per device, its kind."""
    room: tuple[float, ...]
    """Per device, bytes for the model; infinite where memory does not matter."""
    microbatches: int
    state: tuple[float, ...]
    """Per layer, bytes that its weights and optimizer state take all the time."""
    full_state: tuple[float, ...]
    """The same with gradients, all of which are there at the end of a step."""
    kept: tuple[float, ...]
    """Per layer, bytes of a micro-batch's activations up to its B."""
    waiting: tuple[float, ...]
    """Per layer, bytes of a micro-batch from its B to its W."""
    message: float = 0.0
    """The shortest message between two devices."""
    frozen_first: int = 0
    """Layers before the first that trains anything: no gradient is sent to them, and they keep no activations."""
    barrier: bool = True
    """Whether all devices wait for one another between two steps."""
    flushes: bool = True
    """Whether a step ends with an update of all weights; of schedules that never flush only the work is bounded."""
    after: float = 0.0
    """Seconds between a step's last task and its first update: the sum that makes the global norm."""
    all_reduce_per_update: float = 0.0
    """Least seconds that summing a layer's gradients over copies keeps its device's network busy, per second of its
    update."""

    @property
    def tasks(self) -> int:
        """Tasks that a device with a layer has at least for each micro-batch: a forward, and a backward as well, unless
        it may hold frozen layers that need none."""
        return 1 if self.frozen_first else 2

    @property
    def devices(self) -> int:
        """Number of devices, D."""
        return len(self.kind_of)

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.state)

    @property
    def alike(self) -> bool:
        """Return whether all devices are alike."""
        return len(set(self.kind_of)) == 1 and len(set(self.room)) == 1

    @cached_property
    def least(self) -> Kind:
        """Each task on the kind of device that is fastest for it."""
        return Kind.of([self.kinds[k] for k in sorted(set(self.kind_of))], min)

    @cached_property
    def ahead(self) -> tuple[float, ...]:
        """``ahead[i]``: forwards of the layers before i; L + 1 values."""
        return tuple(accumulate(self.least.forward, initial=0.0))

    @cached_property
    def behind(self) -> tuple[float, ...]:
        """``behind[i]``: way back through layers L - 1 down to i; L + 1 values."""
        return tuple(accumulate(reversed(self.least.input_grad), initial=0.0))[::-1]

    def life(self, layer: int) -> float:
        """Least time that a micro-batch's activations of a layer are kept: from its F to the end of its B."""
        return self.ahead[-1] - self.ahead[layer] + self.behind[layer]

    def without(self, resource: Resource) -> Instance:
        """The instance with as much of a resource as anyone could wish for."""
        if resource == "link":
            return replace(self, message=0.0, all_reduce_per_update=0.0)
        if resource == "memory":
            return replace(self, room=(float("inf"),) * self.devices)
        if resource == "barrier":
            return replace(self, barrier=False, after=0.0)
        return self


def alike(
    forward: Sequence[float],
    input_grad: Sequence[float],
    weight_grad: Sequence[float],
    devices: int,
    microbatches: int,
    message: float = 0.0,
    room: float = float("inf"),
    kept: Sequence[float] | None = None,
) -> Instance:
    """An instance of devices that are all alike, of one isolated step without updates.

    Args:
        forward: per layer, seconds of F; ``input_grad`` and ``weight_grad`` of B and W.
        input_grad: see ``forward``.
        weight_grad: see ``forward``.
        devices: D.
        microbatches: N.
        message: of the shortest message.
        room: of each device, in the unit of ``kept``.
        kept: per layer, what a micro-batch's activations take from the F to the end of the W; by default 1.
    """
    backward = tuple(b + w for b, w in zip(input_grad, weight_grad, strict=True))
    zeros = (0.0,) * len(backward)
    kind = Kind(
        forward=tuple(forward),
        input_grad=tuple(input_grad),
        backward=backward,
        recompute=tuple(forward),
        update=zeros,
    )
    size = (1.0,) * len(backward) if kept is None else tuple(kept)
    return Instance(
        kinds=(kind,),
        kind_of=(0,) * devices,
        room=(room,) * devices,
        microbatches=microbatches,
        state=zeros,
        full_state=zeros,
        kept=size,
        waiting=size,
        message=message,
    )
