"""Strategies for the files and options that users give: right ones, with something changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from raypipe.job import load_cluster, load_job
from raypipe.job.data_spec import DataSpec
from raypipe.job.model_spec import HfSpec, ImportSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.train_spec import TrainSpec

ROOT = Path(__file__).parents[3]
QUICK = ROOT / "jobs" / "quickstart.yaml"
FIXED = ("parallel.schedule=1f1b", "parallel.stages=2", "parallel.microbatch=4")
HUGE = (2**31, 2**53, 2**63, 10**20, 10**400, -1, 0, 1e308, -1e308, 5e-324, 1e-9, float("nan"), float("inf"))
WORDS = (
    "auto", "1f1b", "chimera", "stdlib", "full", "none", "layers", "/dev/zero", "~x/y", "a\0.b", "s3://x", "\u00b2",
    "x" * 3000,
    "../../etc", "zero3", "file:///tmp/x", "nan", "1e400", "gpt2", "block.*", "[", "os:system", "float64", "\ud800",
)  # fmt: skip
PIECES = ("", "\0", "&a *a", "{", "]", ": ", "\n", "-", "\u00b2", "9" * 30, "1e999", '"', "!!x ")
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 40), st.floats(), st.sampled_from(HUGE),
    st.sampled_from(WORDS), st.text(max_size=4),
)  # fmt: skip
values = st.recursive(
    leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=3), v, max_size=3), max_leaves=8
)


@cache
def right_job() -> dict[str, Any]:
    """A job's data, whole."""
    return load_job(QUICK, FIXED).model_dump(mode="json")


@cache
def right_cluster() -> dict[str, Any]:
    """A cluster's data, whole."""
    return load_cluster(ROOT / "cluster" / "devices" / "a100.yaml").model_dump(mode="json")


def paths_in(data: object, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where everything in nested data is."""
    inner: Sequence[tuple[Any, Any]] = ()
    if isinstance(data, Mapping):
        inner = list(data.items())
    elif isinstance(data, list):
        inner = list(enumerate(data))
    return [p for key, value in inner for p in ((*before, key), *paths_in(value, (*before, key)))]


@st.composite
def changed(draw: Any, right: Any, more: Sequence[tuple[Any, ...]] = (), most: int = 3) -> Any:
    """Right data with up to ``most`` values replaced, removed or added; ``more`` are places that it lacks."""
    data = json.loads(json.dumps(right))
    for _ in range(draw(st.integers(1, most))):
        places = [*paths_in(data), *more]
        if not places:
            break
        place = draw(st.sampled_from(places))
        owner: Any = data
        for key in place[:-1]:
            if isinstance(owner, dict):
                owner = owner.setdefault(key, {})
            else:
                owner = owner[key] if isinstance(owner, list) else None
        if isinstance(owner, dict):
            if draw(st.integers(0, 9)) == 0:
                owner.pop(place[-1], None)
            elif draw(st.integers(0, 9)) == 0:
                owner[draw(st.sampled_from(WORDS))] = draw(leaves)
            else:
                owner[place[-1]] = draw(values)
        elif isinstance(owner, list) and isinstance(place[-1], int) and place[-1] < len(owner):
            what = draw(st.integers(0, 5))
            if what == 0:
                del owner[place[-1]]
            elif what == 1:
                owner.append(owner[place[-1]])
            else:
                owner[place[-1]] = draw(values)
    return data


@st.composite
def torn(draw: Any, text: str) -> str:
    """A text with some characters removed, repeated, exchanged or replaced."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        length = draw(st.integers(0, 12))
        other = draw(st.sampled_from(PIECES))
        kind = draw(st.integers(0, 3))
        middle = text[at : at + length]
        middle = {0: "", 1: middle * 2, 2: other, 3: middle[::-1]}[kind]
        text = text[:at] + middle + text[at + length :]
    return text


JOB_PLACES = [
    *(("train", key) for key in TrainSpec.model_fields), *(("parallel", key) for key in ParallelSpec.model_fields),
    *(("data", key) for key in DataSpec.model_fields), *(("model", key) for key in HfSpec.model_fields),
    *(("model", key) for key in (*ImportSpec.model_fields, "import")), ("train", "early_stop", "patience"),
    ("name",), ("parallel",),
]  # fmt: skip
jobs = st.deferred(lambda: changed(right_job(), JOB_PLACES))
OVERRIDES = st.lists(
    st.tuples(st.sampled_from(JOB_PLACES), values).map(lambda p: f"{'.'.join(p[0])}={json.dumps(p[1])}")
    | st.tuples(st.sampled_from(JOB_PLACES), st.sampled_from(WORDS)).map(lambda p: f"{'.'.join(p[0])}={p[1]}")
    | st.sampled_from(["=", "a", "a.b.c.d=1", "train=", "parallel=auto", "train.steps=&a [*a]", "." * 50 + "=1"])
    | st.text(max_size=8),
    max_size=3,
)
EPOCHS: dict[str, Any] = {
    "mp_speedup": {"2": 1.32, "4": 2.0}, "epochs": {"1": 4, "2": 4, "4": 4, "8": 7, "16": 12},
    "scaling_efficiency": {"1": 1.0, "2": 0.9, "4": 0.8, "8": 0.7, "16": 0.6}, "step_s": 0.5, "steps_per_epoch": 100,
}  # fmt: skip
GRAPH: dict[str, Any] = {
    "operations": [
        {"name": "a", "seconds": 1.0, "memory_bytes": 5}, {"name": "b", "seconds": {"g0": 1.0, "g1": 2.0}},
        {"name": "c", "seconds": 0, "colocate": "x"},
    ],
    "edges": [["a", "b", 100.0], ["b", "c", 1.0]],
}  # fmt: skip
HARDWARE: dict[str, Any] = {
    "nodes": [{"name": "g0", "memory_bytes": 1e9}, {"name": "g1"}], "routers": ["sw"],
    "links": [["g0", "sw", {"bandwidth_gb_s": 20, "latency_us": 5}], ["sw", "g1", {"bandwidth_gb_s": 20}]],
}  # fmt: skip
