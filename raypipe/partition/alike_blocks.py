"""A deep model's pieces from a shallow one's: blocks that are alike are captured once, whatever their number.

Capturing takes time in proportion to the layers, and a planner needs of each only what it costs. From some layer on,
most models only repeat one: the same parameters, and the same entries in every list of the configuration that says
something of each layer. Such a model of the transformers library is captured with three of these layers. Where the
first two come out alike, its pieces are those of the shallow model with the second repeated; the last one may differ,
as its results go elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from raypipe.capture.meta import build_without_memory
from raypipe.cost.tensor import TensorRankWork
from raypipe.job import HfSpec, JobSpec
from raypipe.models.sources.hugging_face import HuggingFace, configuration
from raypipe.partition.report import ModelPiece

DEEP = 12
"""Layers from which on a model is not captured whole."""
LAYERS = "num_hidden_layers"
Works = tuple[TensorRankWork, ...]
Pieces = tuple[ModelPiece, ...]


class _Segment(NamedTuple):
    """Consecutive pieces of one block, or of none."""

    block: str
    pieces: Pieces
    works: Works

    def renamed(self, block: str) -> _Segment:
        """Return the same of another block."""

        def name(of: str) -> str:
            return f"{block}.{of.removeprefix(f'{self.block}.')}" if of.startswith(f"{self.block}.") else of

        pieces = tuple(
            replace(
                piece,
                block=block,
                parameters=tuple((name(one), count) for one, count in piece.parameters),
                frozen=tuple(map(name, piece.frozen)),
            )
            for piece in self.pieces
        )
        return _Segment(block, pieces, self.works)

    @property
    def looks(self) -> object:
        """Return what is equal for segments that are alike but for names."""
        own = self.renamed("*") if self.block else self
        bare = [replace(p, behind=tuple(replace(tensor, name="") for tensor in p.behind)) for p in own.pieces]
        return bare, [work._replace(work=replace(work.work, name="")) for work in self.works]


def alike_blocks(job: JobSpec, capture: Callable[[JobSpec], tuple[Pieces, Works]]) -> tuple[Pieces, Works] | None:
    """Return the pieces of a deep model and their work; None if its blocks are not known to be alike.

    Args:
        job: whose model it is.
        capture: returns the pieces of a job's model and their work.
    """
    if not isinstance(job.model, HfSpec) or job.model.lora is not None:
        return None
    config = configuration(job.model.hf, job.model.config)
    depth = getattr(config, LAYERS, 0)
    if depth < DEEP or config.sub_configs:
        return None
    few = _alike_from(job.model.model_dump_json(), depth) + 4
    if few > depth // 2:
        return None
    captured = _segments(*capture(_with_layers(job, config, depth, few)))
    blocks = [one for one in captured if one.block]
    if len(blocks) != few or blocks[-2].looks != blocks[-3].looks:
        return None
    path, at = blocks[-1].block.rpartition(".")[0], captured.index(blocks[-1])
    more = (blocks[-2].renamed(f"{path}.{n}") for n in range(few - 1, depth - 1))
    whole = [*captured[:at], *more, blocks[-1].renamed(f"{path}.{depth - 1}"), *captured[at + 1 :]]
    pieces = tuple(piece for one in whole for piece in one.pieces)
    works = (work for one in whole for work in one.works)
    return pieces, tuple(
        work._replace(work=replace(work.work, name=f"{n} {piece.label}"))
        for n, (piece, work) in enumerate(zip(pieces, works, strict=True))
    )


def _with_layers(job: JobSpec, config: Any, depth: int, layers: int) -> JobSpec:
    """Return the job with a model of so many layers; lists that say something of each layer are as long."""
    assert isinstance(job.model, HfSpec)
    lists = {key: value[:layers] for key, value in config.to_dict().items() if _of_each(value, depth)}
    changes = {**job.model.config, **lists, LAYERS: layers}
    if (own := config.attribute_map.get(LAYERS)) is not None:  # the type's own name of it
        changes.pop(own, None)
    return job.model_copy(update={"model": job.model.model_copy(update={"config": changes})})


def _of_each(value: object, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


@lru_cache(maxsize=4)
def _alike_from(spec: str, depth: int) -> int:
    """Return the first layer that all later ones are like, of an ``HfSpec`` as JSON; ``depth`` if that is not known."""
    source = HuggingFace(HfSpec.model_validate_json(spec))
    config = source.config
    lists = [value for value in config.to_dict().values() if _of_each(value, depth)]
    looks: list[list[object]] = [[value[n] for value in lists] for n in range(depth)]
    paths = set()
    for name, parameter in build_without_memory(source.build).named_parameters():
        parts = name.split(".")
        at = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None:
            paths.add(tuple(parts[:at]))
            if int(parts[at]) >= depth:
                return depth
            looks[int(parts[at])].append((parts[at + 1 :], tuple(parameter.shape)))
    if len(paths) != 1:
        return depth
    return 1 + max((n for n in range(depth) if looks[n] != looks[-1]), default=-1)


def _segments(pieces: Pieces, works: Works) -> list[_Segment]:
    def of_blocks() -> Iterator[_Segment]:
        for block, group in groupby(zip(pieces, works, strict=True), key=lambda both: both[0].block):
            own = list(group)
            yield _Segment(block, tuple(piece for piece, _ in own), tuple(work for _, work in own))

    return list(of_blocks())
