"""The partition of a job: its model, its schedule's stages, the costs asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.atomic_write import write_whole
from raypipe.capture.captured import Notify, cache_folder, to_stderr
from raypipe.cost.analytic import analytic_profile
from raypipe.cost.layer_work import ExpertsWork, LayerWork, Product, TaskWork
from raypipe.cost.profile import Slicing, load_profile
from raypipe.cost.profile_check import check_profile
from raypipe.cost.stages import as_exchanged
from raypipe.cost.tensor import TensorRankWork
from raypipe.errors import RequestError
from raypipe.files import read_json
from raypipe.graph.fingerprint import MODEL_CODE, TENSOR_CODE, fingerprint, transformers_code
from raypipe.job import HfSpec, JobSpec
from raypipe.job.cluster import load_cluster
from raypipe.job.field_types import FP8
from raypipe.job.requested_schedule import base_schedule
from raypipe.partition.report import Crossing, ModelPiece, Partition, make_partition
from raypipe.partition.this_machine import this_machine


def partition_job(
    job: JobSpec, profile: Path | None = None, cluster: Path | None = None, memory_bytes: float | None = None
) -> Partition:
    """Cut the sub-graphs of a job's model into the stages of its schedule.

    Args:
        job: the job.
        profile: file with measured costs of its layers; None for computed ones.
        cluster: file that describes the devices to compute costs for; None for this machine's.
        memory_bytes: what a device may hold; None if that does not matter.

    Raises:
        SpecError: a file that cannot be read or is of another model, more stages than sub-graphs, too little memory.
        CaptureError: the model cannot be captured.
    """
    schedule = base_schedule(job.parallel, job.train.batch)
    described = None if cluster is None else load_cluster(cluster).of_one_kind(str(cluster))
    measured = None if profile is None else load_profile(profile)
    if measured is not None:
        check_profile(job, measured)
    pieces, tensor_ranks, _ = job_pieces(divided(job, 1))
    if measured is None:
        where = this_machine(job.train.dtype, schedule.devices) if described is None else described
        works = [tensor_rank.work for tensor_rank in tensor_ranks]
        measured = analytic_profile(
            works, where, job.train.dtype, [job.parallel.microbatch], job.train.optimizer, job.train.momentum > 0
        )
    measured = as_exchanged(measured, job.train, job.parallel)
    return make_partition(
        pieces, measured, schedule, job.parallel.microbatch, memory_bytes, job.train.optimizer, job.train.momentum
    )


def divided(job: JobSpec, size: int) -> JobSpec:
    """Return the job with its layers shared by groups of ``size``, and whole experts: what copies that divide these pay
    follows from that (``cost.experts``)."""
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": size, "experts": 1})})


def job_pieces(job: JobSpec, alike: bool = False) -> JobPieces:
    """Return the model's pieces, their work and how it runs in slices: from the cache, or from the model.

    Where the job divides layers, the first two are a member's share.

    Args:
        job: the job.
        alike: repeat one block of a deep model for those that are alike (``alike_blocks``). What crosses cuts behind
            them has that one's name then.

    Raises:
        SpecError: the model does not divide.
        CaptureError: it cannot be captured.
    """
    if job.train.dtype == FP8:  # for planning alone: the same operations, of which some compute in FP8
        job = job.model_copy(update={"train": job.train.model_copy(update={"dtype": "bfloat16-true"})})
    key = pieces_key(job)
    for one in () if key is None else (key, f"{key}.alike")[: 1 + alike]:
        kept = load_pieces(one)
        if kept is not None:
            return kept
    if alike and isinstance(job.model, HfSpec):
        result = _of_alike(job)
        if result is not None:
            if key is not None:
                save_pieces(f"{key}.alike", result)
            return result
    from raypipe.data import declared_fields  # torch from here on
    from raypipe.models import build_model
    from raypipe.partition.pieces import pieces_of, slicing_of, tensor_ranks_of

    fields = declared_fields(job.data)
    model = build_model(job, fields, tensor_rank=0)
    slicing = slicing_of(job, model, fields)
    result = JobPieces(pieces_of(model, job.parallel.microbatch), tensor_ranks_of(job, model), slicing)
    if key is not None:
        save_pieces(key, result)
    return result


def _of_alike(job: JobSpec) -> JobPieces | None:
    from raypipe.partition.alike_blocks import alike_blocks

    captured: list[JobPieces] = []

    def capture(shallow: JobSpec) -> tuple[tuple[ModelPiece, ...], tuple[TensorRankWork, ...]]:
        captured.append(job_pieces(shallow))
        return captured[-1].pieces, captured[-1].tensor_ranks

    result = alike_blocks(job, capture)
    return None if result is None else JobPieces(*result, captured[0].slicing)


# The pieces of a job's model on disk, so that its partition can be looked at again without torch.
#
# Only for models whose code and configuration can be told without running any of it: the built-in GPT needs no keeping,
# and what a function builds is known only once it has run.
KEPT_AS = 6
"""Version of what is kept; increased when it changes, so that older pieces are no longer found."""


class JobPieces(NamedTuple):
    """A job's model as the planner knows it."""

    pieces: tuple[ModelPiece, ...]
    tensor_ranks: tuple[TensorRankWork, ...]
    """The work of each piece; a tensor rank's share of it where the job divides layers."""
    slicing: Slicing


def pieces_key(job: JobSpec) -> str | None:
    """Return the key under which the pieces of this job's model are kept; None if that cannot be told."""
    if not isinstance(job.model, HfSpec) or job.data.type != "bytes":
        return None
    config = Path(job.model.hf) / "config.json"
    try:
        says = read_json(config) if config.is_file() else {"model_type": job.model.hf}
    except (OSError, ValueError):
        return None
    asked = {
        "model": job.model.model_dump(mode="json"),
        "config": says,
        "data": job.data.model_dump(mode="json"),
        "dtype": job.train.dtype,
        "microbatch": job.parallel.microbatch,
        "kept_as": KEPT_AS,
    }
    code = [*transformers_code(str(says.get("model_type"))), *sorted(MODEL_CODE.rglob("*.py"))]
    if job.parallel.tensor > 1:
        asked["tensor"] = job.parallel.tensor
        own = job.parallel.tensor_table
        code += [
            *sorted(TENSOR_CODE.rglob("*.[py]*")),
            *([Path(own)] if own is not None and Path(own).is_file() else []),
        ]
    if job.parallel.experts > 1:
        asked["experts"] = job.parallel.experts
        code += sorted(TENSOR_CODE.rglob("*.py"))
    return fingerprint(asked, code, ("torch", "transformers"))


def load_pieces(key: str, notify: Notify = to_stderr) -> JobPieces | None:
    """The pieces kept under a key, and their work; None if there are none."""
    path = cache_folder() / f"{key}.pieces.json"
    try:
        pieces, tensor_ranks, slicing = read_json(path)
        return JobPieces(
            tuple(map(_piece, pieces)), tuple(map(_tensor_rank, tensor_ranks)), Slicing.model_validate(slicing)
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        notify(f"passed over {path}: {error.strerror}")
    except (KeyError, TypeError, ValueError, RequestError) as error:
        notify(f"passed over {path}: it is damaged ({type(error).__name__}: {error})")
    return None


def save_pieces(key: str, found: JobPieces, notify: Notify = to_stderr) -> None:
    """Keep them; a folder that can't be written is no error."""
    works = [[asdict(rank.work), *rank[1:]] for rank in found.tensor_ranks]
    content = json.dumps([[asdict(p) for p in found.pieces], works, found.slicing.model_dump()])
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_whole(cache_folder() / f"{key}.pieces.json", content.encode())
    except OSError as error:
        notify(f"the pieces are not kept: {cache_folder()}: {error.strerror}")


def _piece(item: dict[str, Any]) -> ModelPiece:
    behind = tuple(Crossing(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in item["behind"])
    values = tuple((str(name), int(count)) for name, count in item["parameters"])
    return ModelPiece(**{**item, "behind": behind, "parameters": values, "frozen": tuple(item["frozen"])})


def _tensor_rank(item: list[Any]) -> TensorRankWork:
    work, *exchanged = item
    forward, backward, gathers = (tuple(map(float, each)) for each in exchanged)
    return TensorRankWork(_work(work), forward, backward, gathers)


def _work(item: dict[str, Any]) -> LayerWork:
    tasks = {}
    for key in ("forward", "input_grad", "weight_grad"):
        products = tuple(Product(*product) for product in item[key]["products"])
        tasks[key] = TaskWork(**{**item[key], "products": products})
    experts = item["experts"] and ExpertsWork(*item["experts"])
    return LayerWork(**{**item, **tasks, "experts": experts})
