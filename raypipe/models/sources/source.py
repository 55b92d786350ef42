"""Where a captured model comes from: what builds it, what it is trained for, and its start values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from raypipe.models.start_values import StartValues
from raypipe.models.task import Field, Task


class Identity(NamedTuple):
    """What a model's forward follows from: another one of any of these may compute something else."""

    says: Any
    """Its configuration or structure, as plain data."""
    code: Sequence[Path]
    packages: Sequence[str]
    """Installed ones, which are known by their versions."""


class ModelSource(Protocol):
    """One kind of captured model."""

    outputs: Sequence[str] | None
    """The output that the loss reads, by name; None where the model returns one tensor, or what it returns is not known
    yet."""

    def build(self) -> nn.Module:
        """Construct the module, in the precision and on the device it chooses itself."""

    def identity(self, build: Callable[[], nn.Module]) -> Identity:
        """All that its forward follows from, beside the job's words for it."""

    def task(self, arrays: Mapping[str, Field] | None, mask: float) -> Task:
        """What it is trained for on these arrays, or on text where None; ``mask`` is the share a masked model guesses.

        Raises:
            SpecError: nothing that fits the data.
        """

    def values(self, build: Callable[[], nn.Module]) -> StartValues:
        """Its start values; ``build`` is the constructor in the job's precision."""
