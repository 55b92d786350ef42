"""Which of a stage's tensors, and of their gradients, belong to the message from or to which other stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from raypipe.graph.stages.links import StageEnds


@dataclass(frozen=True, slots=True)
class Ports:
    """Positions of the tensors of each message, by the other stage."""

    sends: Mapping[int, tuple[int, ...]]
    """Among the stage's outputs."""
    returned: Mapping[int, tuple[int, ...]]
    """Of the gradients that a later stage returns, among those of all outputs that a gradient is received for."""
    returns: Mapping[int, tuple[int, ...]]
    """Of the gradients for an earlier stage, among those of all arrived tensors whose gradient is sent back."""

    @staticmethod
    def of(ends: StageEnds, takes_gradient: Sequence[bool], gives_gradient: Sequence[bool]) -> Ports:
        """Number a stage's tensors.

        Args:
            ends: what it exchanges with other stages.
            takes_gradient: per arriving result, whether its gradient is sent back.
            gives_gradient: per leaving result, whether a gradient is received for it.
        """
        outputs = {result: i for i, result in enumerate(ends.leaving)}
        wanted = [result for result, gives in zip(ends.leaving, gives_gradient, strict=False) if gives]
        gradients = {result: i for i, result in enumerate(wanted)}
        returns: dict[int, tuple[int, ...]] = {}
        flags, made = iter(takes_gradient), 0
        for source, results in ends.arrives.items():
            count = sum(next(flags) for _ in results)
            returns[source] = tuple(range(made, made + count))
            made += count
        return Ports(
            {n: tuple(outputs[r] for r in results) for n, results in ends.leaves.items()},
            {n: tuple(gradients[r] for r in results if r in gradients) for n, results in ends.leaves.items()},
            returns,
        )

    def summed(self, arrived: Sequence[tuple[int, tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
        """Return the gradients of the stage's outputs: where several stages read one, theirs are added.

        Args:
            arrived: per message, the stage that sent it, and its gradients.
        """
        if len(arrived) == 1:  # the usual case, short as it is in every backward
            stage, gradients = arrived[0]
            if self.returned[stage] == tuple(range(len(gradients))):
                return gradients
        total: dict[int, Tensor] = {}
        for stage, gradients in arrived:
            for i, gradient in zip(self.returned[stage], gradients, strict=True):
                total[i] = total[i] + gradient if i in total else gradient
        return tuple(total[i] for i in sorted(total))
