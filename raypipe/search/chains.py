"""Orders by due dates for chains of stages, thousands a second: what a search for the chain itself measures them by.

A ``Problem`` takes ten times as long to build as its order. All chains of as many stages have the same lanes, so these
are derived once, and only what the placement and the costs say is filled in for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.list_scheduling import LaneArrays, floats
from raypipe.search.problem import Problem, build

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raypipe.search.list_kernel import Template


@dataclass(slots=True)
class Chains:
    """All chains with so many micro-batches, B and W apart, one replica."""

    microbatches: int
    _templates: dict[tuple[int, tuple[int, ...]], Template] = field(default_factory=dict)

    def ends(
        self,
        row: NDArray[Any],
        times: NDArray[Any],
        sizes: NDArray[Any],
        lag: NDArray[Any],
        cap: NDArray[Any],
        numbers: NDArray[Any],
        ahead: NDArray[Any],
        frozen: tuple[int, ...] = (),
        useless: float = inf,
        power: float = 1.0,
        in_spans: bool = False,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """When each device ends, and how long it takes from its first start, in orders by due dates.

        Args:
            row: the device of each stage; (S,), int64. All else is float64.
            times: of F, B and W of each stage; (S, 3).
            sizes: what an activation takes up to its B, and from there to its W; (S, 2).
            lag: of a message between each stage and the next, if they are on different devices; (S,).
            cap: memory limit per device; (D,).
            numbers: of each order, see ``priorities.paced``; (orders, 5).
            ahead: of each order, how many forwards each stage may run ahead of its backwards; (orders, S).
            frozen: stages that have no W.
            useless: an order is given up as soon as the mean over devices cannot be below.
            power: of that mean.
            in_spans: it is of times from devices' first starts.

        Returns:
            Two arrays, (orders, D); infinite where memory leaves every device waiting, or an order was given up.
        """
        from raypipe.search import list_kernel as kernel

        template = self._template(len(row), frozen)
        return kernel.paced_ends(template, row, times, sizes, lag, cap, numbers, ahead, useless, power, in_spans)

    def _template(self, stages: int, frozen: tuple[int, ...]) -> Template:
        if (stages, frozen) not in self._templates:
            self._templates[stages, frozen] = self._derived(stages, frozen)
        return self._templates[stages, frozen]

    def _derived(self, stages: int, frozen: tuple[int, ...]) -> Template:
        import numpy as np

        from raypipe.search.list_kernel import Template

        def of(whole: float, waiting: float) -> Problem:
            return build(
                ((0,) * stages,),
                self.microbatches,
                CostTable.even(stages),
                rules=Rules(frozen=frozen),
                sizes=[(whole, waiting)] * stages,
            )

        # What a task allocates and frees is linear in the two sizes.
        one, other = of(1.0, 0.0), of(0.0, 1.0)
        layout = LaneArrays.of(one)
        source = [c for c, own in enumerate(one.after) for _ in own]
        return Template(
            layout.flat,
            np.array(one.stage),
            layout.kind,
            np.array(layout.in_turn),
            np.array(source),
            floats(one.takes),
            floats(other.takes),
            floats(one.frees),
            floats(other.frees),
        )
