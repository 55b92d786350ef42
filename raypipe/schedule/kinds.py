"""The kinds of task, one row each: what everybody who reads a schedule may ask about a kind.

A new kind is a row here, a letter in ``Kind``, a rule in ``deps.py`` and a branch of the runtime's executor. Code that
treats several kinds alike asks one of the sets below; a literal stands only where one kind is made or treated alone.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW", "R", "AR", "U"]


class Traits(NamedTuple):
    """What is true of every task of a kind."""

    what: str
    """For legends."""
    cost: tuple[str, ...]
    """The fields of ``CostTable`` whose sum is its time."""
    default_time: float
    """In a schedule file without times."""
    microbatches: bool = True
    """It works on micro-batches; a bookkeeping task works on a whole stage, once a step."""
    compute: bool = True
    """It occupies its device and counts as busy time in the bubble ratio."""
    input_grad: bool = False
    """It hands the gradient of its stage's input to the stage before."""
    weight_grad: bool = False
    """It makes gradients of weights, the last use of an activation."""
    torch_letter: str | None = None
    """In the CSV of ``torch.distributed.pipelining``; None where that knows no such action."""


TRAITS: Final[dict[Kind, Traits]] = {
    "F": Traits("forward", ("forward",), 1.0, torch_letter="F"),
    "B": Traits("input gradient", ("input_grad",), 1.0, input_grad=True, torch_letter="I"),
    "W": Traits("weight gradient", ("weight_grad",), 1.0, weight_grad=True, torch_letter="W"),
    "BW": Traits("backward", ("input_grad", "weight_grad"), 2.0, input_grad=True, weight_grad=True, torch_letter="B"),
    "R": Traits("recompute", ("recompute",), 0.0),
    "AR": Traits("all-reduce", ("all_reduce",), 0.0, microbatches=False, compute=False),
    "U": Traits("update", ("update",), 0.0, microbatches=False, compute=False),
}
KINDS: Final[tuple[Kind, ...]] = tuple(TRAITS)
"""All kinds, in the order in which files and legends list them."""
COMPUTE: Final = frozenset(k for k, t in TRAITS.items() if t.compute)
BOOKKEEPING: Final = frozenset(k for k, t in TRAITS.items() if not t.microbatches)
BACKWARD: Final = frozenset(k for k, t in TRAITS.items() if t.input_grad)
WEIGHT_GRADIENTS: Final = frozenset(k for k, t in TRAITS.items() if t.weight_grad)
GRADIENTS: Final = BACKWARD | WEIGHT_GRADIENTS
"""All that reads an activation backwards: B, W and BW."""
JOINT: Final = BACKWARD & WEIGHT_GRADIENTS
"""Both gradients in one task; what is not joint is split."""
