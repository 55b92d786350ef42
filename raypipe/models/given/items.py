"""Losses that the script divides by the number of labels of the whole mini-batch, which no micro-batch knows.

Such a loss is ``sum / num_items_in_batch``. So its graph ends before that division, and the runtime, which knows the
number, divides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

from raypipe.capture.captured import Captured
from raypipe.errors import SpecError
from raypipe.graph.calls import Call
from raypipe.models.given.root import ITEMS
from raypipe.models.own_loss import OwnLoss
from raypipe.models.task import IGNORED, Inputs, Task

_DIVISION = "aten.div.Tensor"
_SAME = "aten.alias.default"
FIX = f"divide the sum of the losses by {ITEMS} at the end, or do without it"


def without_items(found: Captured, where: str) -> tuple[Captured, bool]:
    """Return the graph without the division by ``ITEMS`` at its end, and whether there was one.

    Raises:
        SpecError: the loss uses the number otherwise; ``where`` names it.
    """
    graph = found.graph
    sources = {key: source for key, source in graph.sources.items() if key != ITEMS}
    readers = [n for n, operation in enumerate(graph.operations) if ITEMS in operation.operands]
    if not readers:
        return replace(found, graph=replace(graph, sources=sources)), False
    (last,) = graph.outputs.values()
    operation = graph.operations[last]
    if readers != [last] or operation.target != _DIVISION or operation.operands[-1] != ITEMS:
        raise SpecError(where, f"uses {ITEMS} for more than a division of the whole loss", FIX)
    calls = list(found.calls)
    operations = list(graph.operations)
    operations[last] = replace(operation, target=_SAME, operands=operation.operands[:1])
    calls[last] = Call([calls[last].args[0]], {})
    plain = replace(graph, operations=tuple(operations), sources=sources)
    return replace(found, graph=plain, calls=tuple(calls)), True


class SummedLoss(OwnLoss):
    """The data of another task, with a sum over labels that the model returns; the mean is over all labels.

    Args:
        of: the other task.
        fields: names of the data's fields.
        shifted: the first label of each row is no target.
    """

    unit = "as the script computes it"

    def __init__(self, of: Task, fields: Collection[str], shifted: bool) -> None:
        super().__init__(of, fields)
        self.shifted = shifted

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the sum."""
        return output

    def targets(self, inputs: Inputs) -> int:
        """Count the labels that are not ``IGNORED``, as the Trainer does."""
        labels = inputs[self.counted]
        return int((labels[..., 1:] if self.shifted else labels).ne(IGNORED).sum())
