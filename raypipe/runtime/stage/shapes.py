"""Stage IO specs, known before a stage runs, so that receivers can post buffers of the right size in advance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raypipe.models import LayeredModel, Lengths
from raypipe.runtime.transport.channel import StageIOSpec, TensorSpec


class StageIOSpecs(Mapping[int, StageIOSpec]):
    """Per stage but the last, the tensors it sends for a micro-batch of ``samples``, and the gradients it gets back.

    As a mapping, it gives the specs of micro-batches that are padded to the longest sample of all.
    """

    def __init__(self, model: LayeredModel, cut: Sequence[Sequence[int]], samples: int) -> None:
        self.model, self.samples = model, samples
        self.ends = tuple(layers[-1] for layers in cut[:-1])
        self._known: dict[tuple[int, tuple[tuple[str, int], ...]], StageIOSpec] = {}

    def of(self, stage: int, lengths: Lengths) -> StageIOSpec:
        """Return a stage's spec for micro-batches of these lengths, from the shapes the model was captured with.

        Raises:
            RaypipeError: the model was captured for other lengths only.
        """
        key = (stage, tuple(lengths.items()))
        found = self._known.get(key)
        if found is None:
            crossing = self.model.crossing(self.ends[stage], self.samples, lengths)
            found = self._known[key] = StageIOSpec(
                act=tuple(TensorSpec(t.shape, t.dtype) for t in crossing),
                differentiable=tuple(t.differentiable for t in crossing),
            )
        return found

    def __getitem__(self, stage: int) -> StageIOSpec:
        if not 0 <= stage < len(self.ends):
            raise KeyError(stage)
        return self.of(stage, {})

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.ends)))

    def __len__(self) -> int:
        return len(self.ends)
