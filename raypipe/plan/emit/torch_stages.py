"""Stages in the words of ``torch.distributed.pipelining``: modules by name, schedules by class or as a CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from raypipe.errors import RequestError
from raypipe.files import expanded
from raypipe.plan.emit.layout import TrainerLayout
from raypipe.plan.emit.settings import Settings
from raypipe.plan.predict.prediction import Cut
from raypipe.schedule.forms.text import from_torch_csv, to_torch_csv

NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B", "bfs": "LoopedBFS"}
"""Schedules whose order is PyTorch's of that name; others go into a CSV."""
LOOPS, V = "PipelineScheduleMulti", "ZBVZeroBubble"
"""Classes that say where the stages of an order in a CSV lie: round after round, or in a V."""


@dataclass(frozen=True)
class Names:
    """How a model names its modules."""

    embedding: str
    block: str
    """Before a block's number."""
    head: tuple[str, ...]
    everywhere: tuple[str, ...] = ()
    """What each stage has."""

    def of(self, cut: Cut) -> list[list[str]]:
        """Return the modules of each stage.

        >>> Names("embed", "layers.", ("norm", "head")).of((range(0, 2), range(2, 4)))
        [['embed', 'layers.0'], ['layers.1', 'norm', 'head']]
        """
        last = cut[-1].stop - 1

        def one(i: int) -> tuple[str, ...]:
            return (self.embedding,) if not i else self.head if i == last else (f"{self.block}{i - 1}",)

        return [[*(name for i in own for name in one(i)), *self.everywhere] for own in cut]

    def cut(self, parts: Sequence[Sequence[str]], settings: Settings, key: str) -> Cut:
        """Read the modules of each stage.

        Raises:
            SpecError: they are not the embedding, the blocks and the head in turn.
        """
        ends = [0]
        for own in parts:
            ends.append(
                ends[-1]
                + sum(name == self.embedding or name == self.head[-1] or name.startswith(self.block) for name in own)
            )
        cut = tuple(range(a, b) for a, b in pairwise(ends))
        if self.of(cut) != [list(own) for own in parts]:
            raise settings.fail(key, "lists other modules than the embedding, blocks and head in turn", "list these")
        return cut


def written(layout: TrainerLayout, file: Path | None) -> dict[str, str]:
    """Return the schedule's name, and ``csv``, where its order was written, if it has one of its own.

    Raises:
        RequestError: there is no file to write it beside.
    """
    if layout.order is None:
        return {"schedule": NAMES[layout.parallel.schedule]}
    if file is None:
        raise RequestError("--emit", "the plan's order goes into a file beside the trainer's", "give -o FILE")
    beside = file.with_suffix(".csv")
    beside.write_text(to_torch_csv(layout.order))
    return {"schedule": V if layout.parallel.placement == "v" else LOOPS, "csv": str(beside)}


def scheduled(layout: TrainerLayout, settings: Settings, schedule: str, csv: str) -> TrainerLayout:
    """The layout with the schedule that these keys of a file name.

    Raises:
        SpecError: raypipe has no schedule of that name.
    """
    stages = layout.parallel.stages
    chunks = settings.divided(schedule, len(layout.cut), stages)
    words: Mapping[str, str] = {word: name for name, word in NAMES.items()}
    keys: dict[str, Any] = {"chunks": chunks, "placement": "line"}
    file = settings.values.get(csv)
    if not file:
        return layout.with_keys(schedule=settings.choice(schedule, words, "1f1b"), **keys)
    order = replace(from_torch_csv(expanded(Path(str(file))).read_text(), str(file)), name="auto")
    v = settings.choice(schedule, {V: True, LOOPS: False}, False)
    keys |= {"schedule": "auto", "placement": "v" if v else "ring" if chunks > 1 else "line"}
    return replace(layout.with_keys(**keys), order=order)
