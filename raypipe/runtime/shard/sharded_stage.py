"""One stage replica whose weights, gradients or optimizer state its data-parallel copies divide."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from raypipe.runtime.shard.flat_weights import FlatWeights
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.cast_sum import start_all_reduce
from raypipe.runtime.update.collective import Push, wait_for
from raypipe.runtime.update.optimizer import ParameterPiece


class ShardedStage:
    """Gathers weights and reduces gradients of a stage replica when its schedule says so.

    Args:
        module: the stage; the trained parameters' values are moved into flat tensors.
        stage: its number, for errors.
        level: ZeRO level, 1 to 3.
        group: the data-parallel copies that divide it; the rank in it is the number of this device's shard.
        others: the devices that hold the same shard of other groups of copies or directions; None if there are none.
        undivided: names of parameters that stay whole, e.g. those tied to another stage.
        reduce_dtype: in which gradients are summed; None for their own.
        counts: whether this shard counts in the global norm; the other holders of the same shard say no.
    """

    def __init__(
        self,
        module: StageModule,
        stage: int,
        level: int,
        group: dist.ProcessGroup,
        others: dist.ProcessGroup | None,
        undivided: Collection[str] = (),
        counts: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._reduce_dtype = reduce_dtype
        self.stage, self.level, self.group, self.others, self.counts = stage, level, group, others, counts
        by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for name, p in module.trained.items():
            if name not in undivided:
                by_dtype.setdefault(p.dtype, {})[name] = p
        self.flats = [FlatWeights(parameters, group, level, reduce_dtype) for parameters in by_dtype.values()]
        self.names = frozenset(name for flat in self.flats for name in flat.parameters)
        """The parameters that are divided."""
        self.all_gathers = self.reduce_scatters = self.all_reduces = 0.0
        """Collectives since the last reset; each member counts its share of one."""

    @property
    def pieces(self) -> list[nn.Parameter]:
        """Return the parameters that this device's optimizer updates."""
        return [piece for flat in self.flats for piece in flat.pieces]

    @property
    def named_pieces(self) -> list[ParameterPiece]:
        """The same, each with the parameter that it is a part of."""
        return [
            ParameterPiece(piece, "", 1)
            if part.name is None
            else ParameterPiece(piece, part.name, flat.parameters[part.name].dim())
            for flat in self.flats
            for part, piece in zip(flat.parts, flat.pieces, strict=True)
        ]

    def gather(self) -> None:
        """Start to gather the weights (AG)."""
        for flat in self.flats:
            flat.gather()
        self.all_gathers += 1 / self.group.size()

    def wait_gathered(self, push: Push) -> None:
        """Wait until the weights may be read.

        Raises:
            TransportError: another copy did not join in time.
        """
        for flat in self.flats:
            work = flat.take_gathering()
            if work is not None:
                wait_for(f"weight gather of stage {self.stage}", work, push)

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of the groups and of what is under way on them, for good; return them."""
        held = [self.group] if self.others is None else [self.group, self.others]
        for flat in self.flats:
            flat.leave()
        del self.group
        self.others = None
        return held

    def release(self) -> None:
        """Drop the gathered weights (FREE)."""
        for flat in self.flats:
            flat.release()

    @property
    def accumulates(self) -> bool:
        """Return whether gradients accumulate in flat tensors now."""
        return any(flat.gradients.opened for flat in self.flats)

    def open_gradients(self) -> None:
        """Let gradients accumulate in flat tensors."""
        for flat in self.flats:
            flat.gradients.open()

    def reduce_scatter(self) -> None:
        """Start to reduce the gradients so far to this device's shard (RS)."""
        for flat in self.flats:
            flat.reduce_scatter()
        self.reduce_scatters += 1 / self.group.size()

    def add_oldest(self, push: Push) -> None:
        """Wait for the oldest reduce-scatter that is under way, and add its result to this device's shard.

        Raises:
            TransportError: another copy did not join in time.
        """
        for flat in self.flats:
            wait_for(f"gradient reduce-scatter of stage {self.stage}", flat.scattering, push)
            flat.add_oldest()

    def sum_groups(self, push: Push) -> None:
        """Sum this device's shard of the gradients over the other groups of copies, and hand it to the optimizer."""
        if self.others is not None:
            self.all_reduces += 1 / self.others.size()
        for flat in self.flats:
            if self.others is not None:
                work = start_all_reduce(flat.gradient_shard, self.others, self._reduce_dtype)
                wait_for(f"gradient sum of stage {self.stage} over groups of copies", work, push)
            flat.set_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients, after the update."""
        for flat in self.flats:
            flat.drop_gradients()
