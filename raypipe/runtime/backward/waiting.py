"""The memory that weight gradients wait for, or would: the input of their product, and the gradient of its output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # it tells when a tensor's memory is freed

from raypipe.runtime.process.memory import PeakMeter, allocated_bytes
from raypipe.schedule.families.out_of_order import HeldMemory


class StorageSpan(NamedTuple):
    """A tensor's place in memory, without holding it."""

    place: tuple[int, int, int]
    """Its storage, offset and size: alike for tensors that share it."""
    nbytes: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: Tensor) -> StorageSpan:
        """Return that of a tensor."""
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        place = (storage.cdata, int(tensor.storage_offset()), tensor.numel())
        return cls(place, tensor.numel() * tensor.element_size(), storage)

    def freed(self) -> bool:
        """Return whether it has been freed."""
        expired: bool = self.storage.expired()  # type: ignore[no-untyped-call]
        return expired


class Operands(NamedTuple):
    """Of one product."""

    input: StorageSpan
    copied: int | None
    """Bytes of the copy in another dtype that is kept of the input instead; None if it is kept itself."""
    output_bytes: int


@dataclass
class WaitingOperands:
    """The operands of the newest product of each weight."""

    of: dict[Tensor, Operands] = field(default_factory=dict)
    watched: bool = False
    """Whether products that are noted tell when the gradients of their outputs arrive."""
    arrived: Callable[[Tensor, Tensor], None] | None = None
    """Is told a weight and the gradient of its product's output when that arrives, if they were noted as watched."""

    def note(self, weight: Tensor, x: Tensor, y: Tensor) -> None:
        """Note that ``y`` is a product of ``x`` and a weight; an index ``x`` is kept in its own dtype."""
        copied = x.numel() * y.element_size() if x.is_floating_point() and x.dtype != y.dtype else None
        self.of[weight] = Operands(StorageSpan.of(x), copied, y.numel() * y.element_size())
        if self.watched and y.requires_grad:

            def arrive(gradient: Tensor) -> None:
                if self.arrived is not None:
                    self.arrived(weight, gradient)

            y.register_hook(arrive)  # type: ignore[no-untyped-call]

    def nbytes(self, weights: Collection[Tensor]) -> int:
        """Return the bytes that the gradients of some weights wait for; an input that they share counts once."""
        noted = [self.of[weight] for weight in weights if weight in self.of]
        inputs = {one.input.place: one.input.nbytes for one in noted if one.copied is None}
        return sum(one.output_bytes + (one.copied or 0) for one in noted) + sum(inputs.values())


# How much memory a backward holds at its fullest, layer by layer, and how much without what will wait anyway.


class LayerPeaks(PeakMeter):  # type: ignore[no-untyped-call]
    """Context manager around a backward on a CPU that tells what it holds layer by layer (``HeldMemory``).

    Memory is read after every operation. At each, it is known which operands of the layers reached so far are still
    allocated: those will wait where their layer is postponed, and so must not count twice.

    Args:
        device: the device.
        waiting: what the forward has noted, watched.
        layers: the weights of each layer.
    """

    def __init__(self, device: torch.device, waiting: WaitingOperands, layers: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(device)
        self._waiting, self._layers = waiting, layers
        self._layer_of = {weight: layer for layer, weights in enumerate(layers) for weight in weights}
        self._sizes = [float(waiting.nbytes(weights)) for weights in layers]
        self._held, self._apart = [0.0] * len(layers), [0.0] * len(layers)
        self._above = 0.0
        self._now = len(layers)
        """The lowest layer reached."""
        self._reached: list[list[Tensor]] = [[] for _ in layers]
        """Per layer, the weights the gradients of whose products' outputs have arrived."""
        self._left = 0.0
        """What the other weights of the layers from ``_now`` on will wait for."""
        self._alive: dict[tuple[int, int, int], StorageSpan] = {}
        """Operands of the weights reached, unless they have been freed."""

    def __enter__(self) -> LayerPeaks:
        """Begin to watch."""
        self._waiting.arrived = self._arrived
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Look for the last time."""
        self._look()
        self._waiting.arrived = None
        super().__exit__(*error)

    def found(self) -> HeldMemory:
        """Return what was seen, in bytes."""
        return HeldMemory(self._above, self._held, self._apart, self._sizes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look after every operation."""
        out = func(*args, **(kwargs or {}))
        self._look()
        return out

    def _arrived(self, weight: Tensor, gradient: Tensor) -> None:
        self._look()
        layer = self._layer_of.get(weight)
        if layer is None:
            return
        self._reached[layer].append(weight)
        self._now = min(self._now, layer)
        from_now = range(self._now, len(self._layers))
        self._left = sum(self._sizes[n] - self._waiting.nbytes(self._reached[n]) for n in from_now)
        operands = self._waiting.of[weight]
        kept = [StorageSpan.of(gradient), *([operands.input] if operands.copied is None else [])]
        self._alive |= {one.place: one for one in kept}

    def _look(self) -> None:
        now = float(allocated_bytes(self.device))
        if self._now == len(self._layers):
            self._above = max(self._above, now)
            return
        self._alive = {place: one for place, one in self._alive.items() if not one.freed()}
        apart = now - sum(one.nbytes for one in self._alive.values()) - self._left
        self._held[self._now] = max(self._held[self._now], now)
        self._apart[self._now] = max(self._apart[self._now], apart)
