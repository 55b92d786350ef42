"""The interface of a source of models: it builds the module and provides its task and its start values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from raypipe.models.start_values import StartValues
from raypipe.models.task import Field, Task

LossFunction = Callable[..., Tensor | tuple[Tensor, Mapping[str, Tensor]]]
"""A loss, of the model and a batch by name; it may return figures beside it (``losses.function``)."""


class Identity(NamedTuple):
    """Everything a model's forward depends on; a cached capture is valid only while all of it is unchanged."""

    says: Any
    """The model's configuration or structure, as plain data."""
    code: Sequence[Path]
    """Source files, which are identified by their content."""
    packages: Sequence[str]
    """Installed packages, which are identified by their versions."""


class ModelSource(Protocol):
    """One kind of captured model."""

    outputs: Sequence[str] | None
    """Names of the outputs to capture; None for all that the model returns."""
    own_loss: bool
    """Whether the task has no loss but the model's own."""
    loss: LossFunction | None
    """The loss of a micro-batch as a whole, where the task has one of its own."""
    constants: Mapping[str, object]
    """Arguments of the forward that are not data."""

    def build(self) -> nn.Module:
        """Construct the module, in the precision and on the device that it chooses itself."""

    def identity(self, build: Callable[[], nn.Module]) -> Identity:
        """Return everything that the forward depends on, besides the job's ``model`` section."""

    def task(self, arrays: Mapping[str, Field] | None, mask: float) -> Task:
        """Return the task the model is trained for on these arrays, or on text if ``arrays`` is None.

        ``mask`` is the share of tokens to mask, for a masked language model.

        Raises:
            SpecError: there is no task that fits the data.
        """

    def values(self, build: Callable[[], nn.Module]) -> StartValues:
        """Return the source of start values; ``build`` is the constructor in the job's precision."""
