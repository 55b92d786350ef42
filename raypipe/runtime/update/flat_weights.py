"""The parameters of one stage replica and one dtype in a flat tensor, of which each member of a group owns a shard.

The parameters' values are views of the flat tensor, so gathering the shards into it restores all of them. At ZeRO
level 3, its memory is freed between ``release`` and the next ``gather``: the views stay, and so do those that autograd
has saved for a backward, which gathers the weights again before it reads them. Weights that are only ever read in
another dtype are gathered in it: the shards, which the optimizer updates, and the gradients stay as they are.

torch's FSDP2 does the same for the modules of a model, driven by hooks around their forwards and backwards. Here the
schedule says when to gather and reduce, and weight gradients may be computed long after a backward (W), of which its
hooks know nothing; so the flat tensors and their collectives are raypipe's own.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 5; Zhao et al. 2023 (PyTorch FSDP, arXiv:2304.11277),
section 4.2, for flat parameters whose storage is freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.runtime.update.buckets import FlatGradients
from raypipe.runtime.update.collectives import Pending, Push, start_all_gather, start_sum, wait_for
from raypipe.schedule.sharding import whole_shards

# Where the elements of several parameters lie in one flat tensor that the members of a group divide evenly.


class FlatPart(NamedTuple):
    """Consecutive elements of one parameter that lie in one shard."""

    name: str | None
    """The parameter; None for padding at the end of the flat tensor."""
    begin: int
    """First element, counted in the parameter."""
    size: int
    """Number of elements."""
    at: int
    """First element, counted in the shard."""


@dataclass(frozen=True)
class FlatLayout:
    """Parameters one after another, padded to a multiple of the number of shards.

    Args:
        sizes: elements of each parameter, by name; in this order they lie in the flat tensor.
        shards: number of members.
        costs: where no parameter may be divided, what the update of each costs: each lies in one shard, those of a
            shard cost about as much as another's, and shards are padded to the largest.
    """

    sizes: Mapping[str, int]
    shards: int
    costs: Mapping[str, float] | None = None

    @property
    def shard(self) -> int:
        """Elements of one shard.

        >>> FlatLayout({"a": 3, "b": 2}, 2).shard
        3
        """
        if self.costs is not None:
            return max(sum(self.sizes[name] for name in names) for names in self.held)
        return -(-sum(self.sizes.values()) // self.shards)

    @property
    def held(self) -> list[list[str]]:
        """Names of the parameters of each shard, where none is divided (``schedule.sharding.whole_shards``).

        >>> FlatLayout({"a": 4, "b": 6, "c": 6, "d": 2}, 2, {"a": 2.0, "b": 3.0, "c": 3.0, "d": 1.0}).held
        [['b', 'a'], ['c', 'd']]
        """
        names = list(self.costs or {})
        return [[names[i] for i in shard] for shard in whole_shards([*(self.costs or {}).values()], self.shards)]

    @property
    def padded(self) -> int:
        """Elements of the flat tensor."""
        return self.shard * self.shards

    @property
    def offsets(self) -> dict[str, int]:
        """First element of each parameter in the flat tensor, in its order.

        >>> FlatLayout({"a": 3, "b": 2}, 2).offsets
        {'a': 0, 'b': 3}
        """
        rows, first = ([list(self.sizes)], 0) if self.costs is None else (self.held, self.shard)
        return {
            name: number * first + at
            for number, names in enumerate(rows)
            for name, at in zip(names, accumulate((self.sizes[name] for name in names), initial=0), strict=False)
        }

    def parts(self, index: int) -> list[FlatPart]:
        """Return what lies in shard ``index``, in order; together the parts cover it.

        >>> FlatLayout({"a": 3, "b": 2}, 2).parts(1)
        [FlatPart(name='b', begin=0, size=2, at=0), FlatPart(name=None, begin=0, size=1, at=2)]
        """
        first, end = index * self.shard, (index + 1) * self.shard
        found: list[FlatPart] = []
        for name, offset in self.offsets.items():
            begin, until = max(first, offset), min(end, offset + self.sizes[name])
            if begin < until:
                found.append(FlatPart(name, begin - offset, until - begin, begin - first))
        used = sum(part.size for part in found)
        if used < self.shard:
            found.append(FlatPart(None, 0, self.shard - used, used))
        return found


class FlatWeights:
    """Flat weights and gradients of parameters of one dtype, of one stage.

    Args:
        parameters: by name, the same on all members; their values are moved into the flat tensor.
        group: the members. Each owns the shard whose number is its rank in the group.
        others: those that hold the same shard; None if nobody else does.
        level: ZeRO level: 1 divides optimizer state, 2 gradients too, 3 weights too.
        stage: the stage's number, for errors.
        reduce_dtype: in which gradients are summed; None for their own.
        costs: of the update of each parameter, where none may be divided (``FlatLayout``).
        gather_dtype: in which weights are gathered, at level 3; None for their own.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        others: dist.ProcessGroup | None,
        level: int,
        stage: int,
        reduce_dtype: torch.dtype | None = None,
        costs: Mapping[str, float] | None = None,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        self._reduce_dtype, self._stage = reduce_dtype, stage
        self.group, self.others, self.level = group, others, level
        self.layout = FlatLayout({name: p.numel() for name, p in parameters.items()}, group.size(), costs)
        offsets = self.layout.offsets
        self.parameters = {name: parameters[name] for name in offsets}
        first = next(iter(parameters.values()))
        values = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        self.whole = values if gather_dtype is None else torch.empty_like(values, dtype=gather_dtype)
        with torch.no_grad():
            for name, offset in offsets.items():
                p = parameters[name]
                place = slice(offset, offset + p.numel())
                values[place].view(p.shape).copy_(p)
                p.data = self.whole[place].view(p.shape)
                if gather_dtype is not None:
                    p.grad_dtype = values.dtype
        own = values[self._of_this_member]
        self.shard = own.clone() if level == 3 else own
        """This member's shard of the weights; below level 3 a view of the flat tensor."""
        self.parts = self.layout.parts(group.rank())
        self.pieces = [nn.Parameter(self._shaped(self.shard, part)) for part in self.parts]
        """What this member's optimizer updates: its part of each parameter, as views of the shard."""
        self._bytes = self.whole.untyped_storage().nbytes()
        self.gathered = True
        """Whether the parameters have their values, up to the last ``gather``."""
        places = self.layout.padded, list(offsets.values())
        self.gradients = FlatGradients(list(self.parameters.values()), *places, dtype=values.dtype)
        self._gathering: Pending | None = None
        """The gather that nobody has waited for yet."""
        self._scattering: list[tuple[Pending, Tensor]] = []
        """Reduce-scatters that are under way, oldest first, each with its result: a part of the gradients, in place."""
        self._gradient_shard: Tensor | None = None
        if level == 3:
            self.release()

    @property
    def _of_this_member(self) -> slice:
        first = self.group.rank() * self.layout.shard
        return slice(first, first + self.layout.shard)

    def _shaped(self, shard: Tensor, part: FlatPart) -> Tensor:
        """Return a part of a tensor like the shard: flat, or where no parameter is divided in its shape; zeros at the
        end are then a matrix of one row."""
        flat = shard[part.at : part.at + part.size]
        if self.layout.costs is None:
            return flat
        return flat.view((1, -1) if part.name is None else self.parameters[part.name].shape)

    def gather(self) -> None:
        """Start to gather all shards; ``wait_gathered`` comes before the weights are read."""
        if not self.gathered:
            self.whole.untyped_storage().resize_(self._bytes)
            self.gathered = True
        self._gathering = start_all_gather(self.whole, self.shard.to(self.whole.dtype), self.group)

    def wait_gathered(self, push: Push) -> None:
        """Wait until the weights may be read.

        Raises:
            TransportError: another member did not join in time.
        """
        work, self._gathering = self._gathering, None
        if work is not None:
            wait_for(f"weight gather of stage {self._stage}", work, push)

    def release(self) -> None:
        """Free the gathered weights (level 3); the shard stays."""
        assert self.level == 3
        self.whole.untyped_storage().resize_(0)
        self.gathered = False

    def reduce_scatter(self) -> None:
        """Start to sum the gradients over the members; this member keeps its shard of the sum (``add_oldest``)."""
        self.gradients.open()
        gradients = self.gradients.close()
        self._scattering.append(start_sum(gradients, self.group, self._reduce_dtype, self._of_this_member))

    def add_oldest(self, push: Push) -> None:
        """Wait for the oldest reduce-scatter that is under way, and add its result to the gradient's shard.

        Raises:
            TransportError: another member did not join in time.
        """
        work, own = self._scattering.pop(0)
        wait_for(f"gradient reduce-scatter of stage {self._stage}", work, push)
        if self._gradient_shard is None:
            self._gradient_shard = own.clone()  # not a view: the other members' parts are freed
        else:
            self._gradient_shard.add_(own)

    def set_gradients(self, push: Push) -> None:
        """Make the gradient's shard, summed over those who hold the same one, the gradients of ``pieces``.

        Raises:
            TransportError: another holder did not join in time.
        """
        shard = self.shard.new_zeros(self.layout.shard) if self._gradient_shard is None else self._gradient_shard
        if self.others is not None:
            what = f"gradient sum of stage {self._stage} over groups of copies"
            wait_for(what, start_sum(shard, self.others, self._reduce_dtype)[0], push)
        for part, piece in zip(self.parts, self.pieces, strict=True):
            piece.grad = self._shaped(shard, part)

    def drop_gradients(self) -> None:
        """Drop all gradients, after the update."""
        for piece in self.pieces:
            piece.grad = None
        self._gradient_shard = None

    def leave(self) -> None:
        """Let go of the group and of what is under way on it, for good: its connections end with the last reference."""
        self._gathering = None
        self._scattering.clear()
        self.others = None
        del self.group
