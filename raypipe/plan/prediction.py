"""What the planner says of one candidate: its step, its memory, whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.cost.memory import DeviceMemory
from raypipe.plan.candidate import Candidate
from raypipe.plan.cut import Cut
from raypipe.plan.form import Form
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One candidate, judged. Times in seconds, memory in bytes; devices are those of one data-parallel copy, since all
    copies do the same."""

    candidate: Candidate
    batch: int
    """Samples of a step."""
    cut: Cut
    costs: CostTable
    step_s: float
    """Steady time of a step."""
    compute_s: float
    """The same without gradient sums and updates: compute tasks and messages."""
    busy_s: float
    """Mean time that a device computes."""
    memory: tuple[DeviceMemory, ...]
    """Per device, at its fullest moment."""
    capacity: float
    """Memory of a device."""
    keep: tuple[float, ...] | None = None
    """Per stage, share of micro-batches not recomputed (stage-aware)."""
    order: Schedule | None = None
    """The order of a searched schedule; None where its name generates it."""

    @property
    def form(self) -> Form:
        """Placement and kinds of task."""
        return Form.of(self.order, "auto") if self.order is not None else self.candidate.form

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
        """The device that needs most."""
        return max(range(len(self.memory)), key=self.memory_bytes.__getitem__)

    @property
    def excess(self) -> float:
        """Bytes that the fullest device lacks; negative: spare."""
        return max(self.memory_bytes) - self.capacity

    @property
    def fits(self) -> bool:
        """No device needs more than it has."""
        return self.excess <= 0
