"""A process's share of a divided model: its tensor rank, and the table that says which layers are divided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raypipe.tensor.divide import divide
from raypipe.tensor.shard import Shard
from raypipe.tensor.table import table_for


def divide_module(module: nn.Module, division: Division) -> dict[str, Shard]:
    """Divide a transformers module by the feature table of its family, which its ``config`` names.

    Raises:
        SpecError: there is no table, the table does not fit, or a size is not divisible.
    """
    config = getattr(module, "config", None)
    return division.divide(module, getattr(config, "model_type", type(module).__name__), config, gather_logits=True)


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a model as one tensor rank sees it."""

    size: int
    """Number of tensor ranks."""
    tensor_rank: int
    table: str | None = None
    """Path of the user's feature table; None for that of the model's family."""

    def divide(
        self, model: nn.Module, model_type: str, config: Any, *, gather_logits: bool, part: bool = False
    ) -> dict[str, Shard]:
        """Divide a model whose parameters have no memory yet; see ``divide``.

        Raises:
            SpecError: there is no table, the table does not fit, or a size is not divisible.
        """
        table = table_for(model_type, Path(self.table) if self.table is not None else None)
        return divide(model, table, config, self.size, gather_logits=gather_logits, part=part)

    def cut(self, shard: Shard | None, whole: Tensor) -> Tensor:
        """Return this rank's share of a parameter's value; all of it if it is not divided."""
        return whole if shard is None else shard.cut(whole, self.tensor_rank)
