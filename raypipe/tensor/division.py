"""Which share of a model a process holds: a member of a tensor group, and the table that says what is divided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raypipe.tensor.divide import divide
from raypipe.tensor.shard import Shard
from raypipe.tensor.table import table_for


def divide_module(module: nn.Module, division: Division) -> dict[str, Shard]:
    """Divide a module as its own configuration's family says; its ``config`` is that of the transformers library.

    Raises:
        SpecError: there is no table, or it does not fit; something does not divide.
    """
    config = getattr(module, "config", None)
    return division.divide(module, getattr(config, "model_type", type(module).__name__), config, gather_logits=True)


@dataclass(frozen=True, slots=True)
class Division:
    """One member's view of a divided model."""

    size: int
    """Members of the group."""
    tensor_rank: int
    table: str | None = None
    """A feature table of the user's; None for that of the model's family."""

    def divide(
        self, model: nn.Module, model_type: str, config: Any, *, gather_logits: bool, part: bool = False
    ) -> dict[str, Shard]:
        """Divide a model whose parameters are not real yet; see ``divide``.

        Raises:
            SpecError: there is no table, or it does not fit; something does not divide.
        """
        table = table_for(model_type, Path(self.table) if self.table is not None else None)
        return divide(model, table, config, self.size, gather_logits=gather_logits, part=part)

    def cut(self, shard: Shard | None, whole: Tensor) -> Tensor:
        """This member's share of a parameter's value."""
        return whole if shard is None else shard.cut(whole, self.tensor_rank)
