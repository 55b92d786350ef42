"""The report of a worker on the compilation of its stages; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CompileState = Literal["settled", "compiling", "ready"]
"""How far a device is: it has nothing to swap; its programs are not there yet; they are, and wait for the driver."""


@dataclass(frozen=True)
class CutReport:
    """The consequences of the cut of a stage for memory and for what W can put off, and what is left eager."""

    in_input_grad: tuple[str, ...]
    """Matrices whose gradients are computed in B."""
    kept_bytes: int
    handed_bytes: int
    eager_validation: str | None = None
    """Why the stage runs eagerly in validations, where it was to be compiled for them."""


@dataclass(frozen=True)
class StageReport:
    """The outcome for one stage replica."""

    stage: int
    replica: int
    seconds: float
    """What tracing and compiling took."""
    reason: str | None = None
    """Why it runs eagerly; None if it is compiled."""
    in_input_grad: tuple[str, ...] = ()
    """Matrices whose gradients are computed in B, in a schedule that splits the backward."""
    kept_bytes: int = 0
    """Bytes that a micro-batch of the longest samples keeps from its forward to its backward, without parameters and
    inputs."""
    handed_bytes: int = 0
    """Bytes that it keeps from B to W, alike."""
    lengths: int = 1
    """For how many lengths of samples it is compiled."""
    eager_share: float = 0.0
    """Share of the micro-batches looked at that run eagerly, since they are padded to another length."""
    validation_lengths: int = 0
    """For how many lengths of samples it is compiled for validations; where it is for none, these run eagerly."""
    eager_validation: str | None = None
    """Why so, where it was to be compiled for them."""

    @classmethod
    def of(
        cls, key: tuple[int, int], seconds: float, kept: CutReport, lengths: int, eager_share: float, validation: int
    ) -> StageReport:
        """Return the report of a stage replica that is compiled; ``validation``: lengths wanted for validations."""
        why, sizes = kept.eager_validation, (kept.kept_bytes, kept.handed_bytes)
        result = (validation if why is None else 0), why
        return cls(*key, seconds, None, kept.in_input_grad, *sizes, lengths, eager_share, *result)


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
