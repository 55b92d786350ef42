"""The planner's prediction of one candidate: its step, its memory, whether it fits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from raypipe.cost.memory import DeviceMemory
from raypipe.plan.candidate import Candidate, plainness
from raypipe.plan.predict.form import Form
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule

Cut = tuple[range, ...]
"""The layers of each stage."""


def stages_of(cut: Cut, layers: Collection[int]) -> frozenset[int]:
    """Stages that hold any of these layers."""
    return frozenset(s for s, own in enumerate(cut) if any(i in layers for i in own))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """A plan, judged. Times in seconds, memory in bytes; devices are those of one data-parallel copy, since all copies
    do the same."""

    costs: CostTable
    """Seconds of each task."""
    step_s: float
    """Steady time of a step."""
    compute_s: float
    """The same without gradient sums and updates: compute tasks and messages."""
    busy_s: float
    """Mean time that a device computes."""
    memory: tuple[DeviceMemory, ...]
    """Per device, at its fullest moment."""
    capacities: tuple[float, ...]
    """Memory of each device."""

    @property
    def excess(self) -> float:
        """Bytes that the fullest device lacks; negative: spare."""
        return max(device.total - capacity for device, capacity in zip(self.memory, self.capacities, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(PlanPrediction):
    """One candidate, judged."""

    candidate: Candidate
    batch: int
    """Samples of a step."""
    cut: Cut
    keep: tuple[float, ...] | None = None
    """Per stage, the share of micro-batches that are not recomputed (``full``: 0; ``microbatches``)."""
    recomputed: frozenset[int] | None = None
    """Layers that are recomputed, of those stages that recompute some (``layers``)."""
    frozen: tuple[int, ...] = ()
    """Stages without a trained parameter."""
    order: Schedule | None = None
    """The order of a searched schedule; None where its name generates it."""
    moved: str | None = None
    """Where cut, placement and order were searched together (``plan.joint``): what changed, for people."""

    @property
    def remade(self) -> frozenset[int] | None:
        """Stages that recompute where only some layers are; None where all may."""
        return None if self.recomputed is None else stages_of(self.cut, self.recomputed)

    @property
    def form(self) -> Form:
        """Placement and kinds of task."""
        return Form.of(self.order, "auto") if self.order is not None else self.candidate.form

    @property
    def plainness(self) -> tuple[int, ...]:
        """Smaller is simpler: see ``candidate.plainness``."""
        return plainness(self.candidate, self.form)

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.step_s

    @property
    def bubble_ratio(self) -> float:
        """Share of the step in which a device does not compute, on average."""
        return 1.0 - self.busy_s / self.step_s

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Per device."""
        return tuple(device.total for device in self.memory)

    @property
    def fullest(self) -> int:
        """The device that lacks most, or has least to spare."""
        return max(range(len(self.memory)), key=lambda d: self.memory[d].total - self.capacities[d])

    @property
    def capacity(self) -> float:
        """Memory of the fullest device."""
        return self.capacities[self.fullest]

    @property
    def fits(self) -> bool:
        """No device needs more than it has."""
        return self.excess <= 0
