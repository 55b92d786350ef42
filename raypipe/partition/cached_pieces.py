"""The pieces of a job's model on disk, so that its partition can be looked at again without torch.

Only for models whose code and configuration can be told without running any of it: the built-in GPT needs no keeping,
and what a function builds is known only once it has run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.atomic_write import write_whole
from raypipe.cost.layer_work import Effort, LayerWork
from raypipe.cost.profile import Slicing
from raypipe.cost.tensor import TensorRankWork
from raypipe.errors import RequestError
from raypipe.files import read_json
from raypipe.graph.captured_files import Notify, cache_folder, to_stderr
from raypipe.graph.fingerprint import MODEL_CODE, TENSOR_CODE, fingerprint, transformers_code
from raypipe.job import HfSpec, JobSpec
from raypipe.partition.report import Crossing, Piece

KEPT_AS = 3
"""Version of what is kept; increased when it changes, so that older pieces are no longer found."""


class Kept(NamedTuple):
    """A job's model as the planner knows it."""

    pieces: tuple[Piece, ...]
    tensor_ranks: tuple[TensorRankWork, ...]
    """The work of each piece; a tensor rank's share of it where the job divides layers."""
    slicing: Slicing


def pieces_key(job: JobSpec) -> str | None:
    """What the pieces of this job's model are kept under; None if that cannot be told."""
    if not isinstance(job.model, HfSpec) or job.data.type != "bytes":
        return None
    config = Path(job.model.hf) / "config.json"
    try:
        says = read_json(config) if config.is_file() else {"model_type": job.model.hf}
    except (OSError, ValueError):
        return None
    asked = {
        "model": job.model.model_dump(mode="json"), "config": says, "data": job.data.model_dump(mode="json"),
        "dtype": job.train.dtype, "microbatch": job.parallel.microbatch, "kept_as": KEPT_AS,
    }  # fmt: skip
    code = [*transformers_code(str(says.get("model_type"))), *sorted(MODEL_CODE.rglob("*.py"))]
    if job.parallel.tensor > 1:
        asked["tensor"] = job.parallel.tensor
        own = job.parallel.tensor_table
        code += [
            *sorted(TENSOR_CODE.rglob("*.[py]*")),
            *([Path(own)] if own is not None and Path(own).is_file() else []),
        ]
    return fingerprint(asked, code, ("torch", "transformers"))


def load_pieces(key: str, notify: Notify = to_stderr) -> Kept | None:
    """The pieces kept under a key, and their work; None if there are none."""
    path = cache_folder() / f"{key}.pieces.json"
    try:
        pieces, tensor_ranks, slicing = read_json(path)
        return Kept(tuple(map(_piece, pieces)), tuple(map(_tensor_rank, tensor_ranks)), Slicing.model_validate(slicing))
    except FileNotFoundError:
        return None
    except OSError as error:
        notify(f"passed over {path}: {error.strerror}")
    except (KeyError, TypeError, ValueError, RequestError) as error:
        notify(f"passed over {path}: it is damaged ({type(error).__name__}: {error})")
    return None


def save_pieces(key: str, found: Kept, notify: Notify = to_stderr) -> None:
    """Keep them; a folder that can't be written is no error."""
    works = [[asdict(rank.work), *rank[1:]] for rank in found.tensor_ranks]
    content = json.dumps([[asdict(p) for p in found.pieces], works, found.slicing.model_dump()])
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_whole(cache_folder() / f"{key}.pieces.json", content.encode())
    except OSError as error:
        notify(f"the pieces are not kept: {cache_folder()}: {error.strerror}")


def _piece(item: dict[str, Any]) -> Piece:
    behind = tuple(Crossing(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in item["behind"])
    values = tuple((str(name), int(count)) for name, count in item["parameters"])
    return Piece(**{**item, "behind": behind, "parameters": values, "frozen": tuple(item["frozen"])})


def _tensor_rank(item: list[Any]) -> TensorRankWork:
    work, *exchanged = item
    forward, backward, gathers = (tuple(map(float, each)) for each in exchanged)
    return TensorRankWork(_work(work), forward, backward, gathers)


def _work(item: dict[str, Any]) -> LayerWork:
    efforts = {key: Effort(**item[key]) for key in ("forward", "input_grad", "weight_grad")}
    return LayerWork(**{**item, **efforts})
