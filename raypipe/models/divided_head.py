"""A model whose linear head is divided by rows over several layers, with the loss of them all as the last layer.

The last layer of the model itself then ends with what the head reads. Each share of the head reads that, and says of
each token two numbers (``Unprojected.row_statistics``), of which the last layer makes the loss. So logits exist nowhere
but in the shares, and there only while these numbers are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.graph.liveness import Result
from raypipe.models.layered import VOCABULARY, BodyEnds, CutTensor, LayeredModel, Project, StageBody, TiedGroup
from raypipe.models.task import ANY_LENGTH, IGNORED, Inputs, Labels, Lengths, Task, Unprojected
from raypipe.tensor import Shard

WHOLE = "use whole"


@dataclass(frozen=True)
class ShareLogits(Unprojected):
    """The logits of a share of the rows; its loss is what it says of each token."""

    of: Unprojected
    first: int
    """Its first row."""
    classes: int
    """Rows of all shares."""

    def __getitem__(self, at: Any) -> ShareLogits:
        """See Unprojected."""
        return replace(self, of=self.of[at])

    def then(self, scale: Callable[[Tensor], Tensor]) -> ShareLogits:
        """See Unprojected."""
        return replace(self, of=self.of.then(scale))

    def logits(self) -> Tensor:
        """See Unprojected."""
        return self.of.logits()

    def cross_entropy(self, labels: Tensor, classes: int | None, smoothing: float) -> Tensor:
        """Return the share's numbers, ``[..., 2]``."""
        return self.of.row_statistics(labels - self.first, self.classes, smoothing)


@dataclass(frozen=True)
class AllShares(Unprojected):
    """The statistics of all shares, for each token, ``[shares, ..., 2]``."""

    said: Tensor

    def __getitem__(self, at: Any) -> AllShares:
        """See Unprojected."""
        return AllShares(self.said[(slice(None), *(at if isinstance(at, tuple) else (at,)))])

    def then(self, scale: Callable[[Tensor], Tensor]) -> AllShares:
        """See Unprojected; the shares have done it."""
        return self

    def logits(self) -> Tensor:
        """Refuse: they are nowhere.

        Raises:
            SpecError: always.
        """
        raise SpecError(VOCABULARY, "with split, no device has a token's logits, and predictions are of all", WHOLE)

    def cross_entropy(self, labels: Tensor, classes: int | None, smoothing: float) -> Tensor:
        """See Unprojected."""
        normaliser, likely = self.said[..., 0].logsumexp(0), self.said[..., 1].sum(0)
        return (normaliser - likely).where(labels != IGNORED, 0.0).sum()


class DividedHead(LayeredModel):
    """The layers of a model, then one for each share of its head, then the loss.

    Raises:
        SpecError: the model has no head that can be divided, or not into so many shares.
    """

    def __init__(self, whole: LayeredModel, shares: int) -> None:
        if not isinstance(whole.task, Labels):
            why = "split is for the cross-entropy of a linear head, and this model has another loss"
            raise SpecError(VOCABULARY, why, WHOLE)
        self.whole, self.linear, self.body = whole, whole.head, whole.without_head()
        self.packed = whole.packed
        rows = self.linear.rows
        if rows <= (shares - 1) * -(-rows // shares):
            raise SpecError(
                VOCABULARY, f"{rows} rows do not give each of {shares} devices one", "use whole, or fewer stages"
            )
        body = self.body
        self.first, self.loss = body.count, body.count + shares
        self.names = (*body.names, *(f"head.{i}" for i in range(shares)), "loss")
        self.own_stages = tuple((i,) for i in range(self.first, self.loss + 1))
        self.head_flops = whole.flops[-1] - body.flops[-1]
        self.flops = (*body.flops, *(self.head_flops / shares,) * shares, 0.0)
        self.task, self.shortest_slice = body.task, body.shortest_slice
        self.tied = tuple(TiedGroup(group.name, tuple(self._holders(group))) for group in whole.tied)
        self.placeholders, self.batch_statistics = body.placeholders, body.batch_statistics
        self.loss_chunk, self.shards = whole.loss_chunk, body.shards
        self._divided = [Shard(0, (rows,), shares, axis="vocabulary", own_rank=i) for i in range(shares)]

    def _holders(self, group: TiedGroup) -> Iterator[tuple[int, str]]:
        """Yield a tied group's parameters: in place of the head's, those of the shares."""
        for layer, name in group.parameters:
            own = layer == self.first - 1 and name in self.linear.names
            yield from ((i, name) for i in (self.heads if own else (layer,)))

    @property
    def heads(self) -> range:
        """The shares."""
        return range(self.first, self.loss)

    def shard_of(self, name: str, layers: Sequence[int]) -> Shard | None:
        """See ``LayeredModel.shard_of``."""
        if layers[0] in self.heads and name in self.linear.names:
            return self._divided[layers[0] - self.first]
        return super().shard_of(name, layers)

    @property
    def notices(self) -> tuple[str, ...]:
        """See ``LayeredModel.notices``."""
        return self.body.notices

    @property
    def units(self) -> tuple[range, ...]:
        """Those of the model itself."""
        return self.body.units

    @property
    def results(self) -> tuple[Result, ...]:
        """See ``LayeredModel.results``: every share reads what the model itself ends with."""
        ends = (Result(self.first - 1, tuple(self.heads)), *(Result(i, (self.loss,)) for i in self.heads))
        return (*self.body.results, *ends)

    @property
    def positions(self) -> int:
        """See ``LayeredModel.positions``."""
        return self.body.positions

    def even_length(self) -> int:
        """See ``LayeredModel.even_length``."""
        return self.whole.even_length()

    def slice_lengths(self, slices: int) -> Lengths:
        """See ``LayeredModel.slice_lengths``; shares compute each token by itself."""
        return self.whole.slice_lengths(slices)

    def parameters(self, i: int) -> int:
        """See ``LayeredModel.parameters``."""
        if i < self.first:
            return self.body.parameters(i)
        return len(self._divided[i - self.first].rows) * self.linear.row_elements if i < self.loss else 0

    def parameter_names(self, i: int) -> Collection[str]:
        """See ``LayeredModel.parameter_names``."""
        return self.body.parameter_names(i) if i < self.first else self.linear.names if i < self.loss else ()

    def trained_parameters(self, i: int) -> int:
        """See ``LayeredModel.trained_parameters``."""
        if i < self.first:
            return self.body.trained_parameters(i)
        return self.parameters(i) if any(map(self.whole.is_trained, self.linear.names)) else 0

    def is_trained(self, name: str) -> bool:
        """See ``LayeredModel.is_trained``."""
        return self.whole.is_trained(name)

    def reads(self, layers: Sequence[int]) -> frozenset[str]:
        """See ``LayeredModel.reads``; shares read the targets."""
        own = [i for i in layers if i < self.first]
        targets = self.task.reads if layers[-1] in self.heads else frozenset[str]()
        return (self.body.reads(own) if own else frozenset()) | targets

    def tensors(self, results: Sequence[int], samples: int, lengths: Lengths = ANY_LENGTH) -> tuple[CutTensor, ...]:
        """See ``LayeredModel.tensors``."""
        of_body = len(self.body.results)
        read = self.body.read_by_head(samples, lengths)
        said = torch.float64 if read.dtype == torch.float64 else torch.float32
        numbers = CutTensor((*read.shape[:-1], 2), said, True)
        return tuple(
            self.body.tensors((r,), samples, lengths)[0] if r < of_body else read if r == of_body else numbers
            for r in results
        )

    def build_stage(
        self, layers: Sequence[int], seed: int, device: torch.device | str = "cpu", ends: BodyEnds | None = None
    ) -> StageBody:
        """Build layers of the model itself, or one of the others."""
        if layers[0] < self.first:
            self.body.slices = self.slices
            return self.body.build_stage(layers, seed, device, ends)
        if layers[0] == self.loss:
            return LossOfShares()
        shard = self._divided[layers[0] - self.first]
        return HeadShare(self.whole.build_head(shard, seed, device), shard.rows.start, self.linear.rows, self.task)


class HeadShare(StageBody):
    """The stage body of a share of the head.

    Args:
        head: the head alone, with its rows.
        first: its first row.
        classes: rows of all shares.
        task: the loss.
    """

    def __init__(self, head: StageBody, first: int, classes: int, task: Task) -> None:
        super().__init__()
        self.head, self.first, self.classes, self.task = head, first, classes, task

    def forward(self, arrived: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """Return what it says of each token, with zeros for those at the end that have no target."""
        ((x,), (logits,)) = arrived, self.head(arrived, {})
        said = self.task.loss(ShareLogits(logits, self.first, self.classes), inputs)  # type: ignore[arg-type]
        if said.shape[:-1] != x.shape[:-1]:
            said = F.pad(said, (0, 0, 0, x.shape[-2] - said.shape[-2]))
        return (said,)

    def named(self) -> dict[str, nn.Parameter]:
        """See ``StageBody.named``."""
        return self.head.named()

    def leave_head_to(self, project: Project) -> None:
        """See ``StageBody.leave_head_to``."""
        self.head.leave_head_to(project)


class LossOfShares(StageBody):
    """The stage body of the loss, which has no parameters."""

    def forward(self, arrived: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """Return what stands for the logits."""
        return (AllShares(torch.stack(arrived)),)  # type: ignore[return-value]

    def named(self) -> dict[str, nn.Parameter]:
        """Return none."""
        return {}
