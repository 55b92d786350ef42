"""What weight gradients wait for, or would: the input of their product, and the gradient of its output."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # it tells when a tensor's memory is freed


class Memory(NamedTuple):
    """A tensor's place in memory, without holding it."""

    place: tuple[int, int, int]
    """Its storage, offset and size: alike for tensors that share it."""
    nbytes: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: Tensor) -> Memory:
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

    input: Memory
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
        self.of[weight] = Operands(Memory.of(x), copied, y.numel() * y.element_size())
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
