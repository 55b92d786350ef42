"""The table of task kinds and their properties.

A new kind needs a row here, a letter in ``Kind``, a rule in ``deps.py`` and a handler in the runtime's executor. Code
that treats several kinds alike uses one of the sets below; literals are only for code that is about a single kind.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW", "R", "DF", "CF", "DB", "CB", "AG", "RS", "FREE", "AR", "U"]
BW: Final[Kind] = "BW"
"""Both gradients in one task."""


class Traits(NamedTuple):
    """The properties of a kind of task."""

    what: str
    """Name for legends."""
    cost: tuple[str, ...]
    """The fields of ``CostTable`` whose sum is its time."""
    default_time: float
    """Time if a schedule file gives none."""
    microbatches: bool = True
    """Whether it works on micro-batches; a bookkeeping task works on a whole stage. AR and U occur once per step."""
    compute: bool = True
    """Whether it occupies its device and counts as busy time in the bubble ratio."""
    input_grad: bool = False
    """Whether it computes the gradient of its stage's input for the stage before."""
    weight_grad: bool = False
    """Whether it computes gradients of weights, the last use of an activation."""
    weights: bool = False
    """Whether it reads its stage's weights. W does not: dW of a layer needs its input and its output's gradient."""
    network: bool = False
    """Whether it is a collective: it runs on the network lane of its device, beside compute."""
    torch_letter: str | None = None
    """Letter in the CSV of ``torch.distributed.pipelining``; None if that has no such action."""


TRAITS: Final[dict[Kind, Traits]] = {
    "F": Traits("forward", ("forward",), 1.0, weights=True, torch_letter="F"),
    "B": Traits("input gradient", ("input_grad",), 1.0, input_grad=True, weights=True, torch_letter="I"),
    "W": Traits("weight gradient", ("weight_grad",), 1.0, weight_grad=True, torch_letter="W"),
    BW: Traits(
        "backward",
        ("input_grad", "weight_grad"),
        2.0,
        input_grad=True,
        weight_grad=True,
        weights=True,
        torch_letter="B",
    ),
    "R": Traits("recompute", ("recompute",), 0.0, weights=True),
    "DF": Traits("dispatch", ("dispatch",), 0.0, compute=False, network=True),
    "CF": Traits("combine", ("combine",), 0.0, compute=False, network=True),
    "DB": Traits("dispatch of gradients", ("combine",), 0.0, compute=False, network=True),
    "CB": Traits("combine of gradients", ("dispatch",), 0.0, compute=False, network=True),
    "AG": Traits("weight gather", ("gather",), 0.0, microbatches=False, compute=False, network=True),
    "RS": Traits("gradient reduce-scatter", ("reduce_scatter",), 0.0, microbatches=False, compute=False, network=True),
    "FREE": Traits("reshard", (), 0.0, microbatches=False, compute=False),
    "AR": Traits("all-reduce", ("all_reduce",), 0.0, microbatches=False, compute=False, network=True),
    "U": Traits("update", ("update",), 0.0, microbatches=False, compute=False),
}
KINDS: Final[tuple[Kind, ...]] = tuple(TRAITS)
"""All kinds, in the order of files and legends."""
COMPUTE: Final = frozenset(k for k, t in TRAITS.items() if t.compute)
BOOKKEEPING: Final = frozenset(k for k, t in TRAITS.items() if not t.microbatches)
BACKWARD: Final = frozenset(k for k, t in TRAITS.items() if t.input_grad)
WEIGHT_GRADIENTS: Final = frozenset(k for k, t in TRAITS.items() if t.weight_grad)
GRADIENTS: Final = BACKWARD | WEIGHT_GRADIENTS
"""All kinds of the backward pass: B, W and BW."""
JOINT: Final = BACKWARD & WEIGHT_GRADIENTS
"""Kinds that compute both gradients in one task, the opposite of a split backward."""
READS_WEIGHTS: Final = frozenset(k for k, t in TRAITS.items() if t.weights)
NETWORK: Final = frozenset(k for k, t in TRAITS.items() if t.network)
EXCHANGES: Final[frozenset[Kind]] = frozenset({"DF", "CF", "DB", "CB"})
"""Kinds in which tokens, or their gradients, travel to experts and back: all-to-all."""
SHARDED: Final[frozenset[Kind]] = frozenset({"AG", "RS", "FREE"})
"""Kinds of sharded data parallelism, which may occur several times per step and stage."""
