"""Refuse sizes that no cluster could run, before lists and tensors of such sizes are made."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from raypipe.job.field_types import MOST_DEVICES
from raypipe.job.model_spec import GptSpec
from raypipe.job.parallel_spec import ParallelSpec

MOST_LAYERS = 4096
"""A plan lists every layer and the planner considers every cut, which takes seconds for so many. The deepest published
transformer has 1,000 layers (DeepNet, arXiv:2203.00555)."""
MOST_VALUES = 2**40
"""Values of one tensor, which one device has to hold: 4 TiB in float32."""


def too_large(model: GptSpec, microbatch: int) -> Iterator[tuple[str, str, str]]:
    """Yield (key, why, fix) for each size of the built-in GPT that is too large for any device."""
    if model.layers > MOST_LAYERS:
        deep = "a plan lists every layer, and the deepest published transformer has 1000"
        yield "model.layers", f"is above {MOST_LAYERS}: {deep}", f"use at most {MOST_LAYERS}"
    if 4 * model.hidden**2 > MOST_VALUES:
        yield "model.hidden", _why("a matrix of the MLP"), f"use at most {isqrt(MOST_VALUES // 4)}"
        return
    most = MOST_VALUES // model.hidden
    for key, rows in (("vocabulary", model.vocabulary), ("positions", model.positions or 0)):
        if rows > most:
            yield f"model.{key}", _why(f"the matrix of {key} times hidden"), f"use at most {most}"
            return
    widest = max(4 * model.hidden, model.vocabulary)
    for key, size, times in (
        ("model.sequence", model.sequence, widest),
        ("parallel.microbatch", microbatch, widest * model.sequence),
    ):
        if size * times > MOST_VALUES:
            yield key, _why("an activation of a micro-batch"), f"use at most {max(1, MOST_VALUES // times)}"
            return


def too_many(parallel: ParallelSpec) -> Iterator[tuple[str, str, str]]:
    """Yield (key, why, fix) if a job asks for more than ``MOST_DEVICES`` devices."""
    if parallel.devices > MOST_DEVICES:
        sizes = {key: getattr(parallel, key) for key in ("stages", "replicas", "tensor")}
        key = max(sizes, key=lambda k: sizes[k])
        others = parallel.devices // sizes[key]
        why = f"{parallel.devices} devices in all (stages x replicas x tensor), above the limit of {MOST_DEVICES}"
        yield f"parallel.{key}", why, f"use at most {max(1, MOST_DEVICES // others)}"


def _why(what: str) -> str:
    return f"{what} would have more than 2^40 values (4 TiB in float32), and one device has to hold it"
