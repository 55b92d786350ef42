"""The partition of a job: its model, its schedule's stages, the costs asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import groupby
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from raypipe.capture.captured import Notify, cache_folder, to_stderr
from raypipe.cost.analytic import GIB, analytic_profile, reserved_of
from raypipe.cost.memory.parameter import parameter_bytes
from raypipe.cost.profile import HeadProfile, Slicing, load_profile
from raypipe.cost.profile_check import check_profile
from raypipe.cost.stages import as_job_runs
from raypipe.cost.tensor import TensorRankWork
from raypipe.errors import CaptureError, RequestError, SpecError
from raypipe.files import read_json, read_regular, write_whole
from raypipe.graph.fingerprint import MODEL_CODE, TENSOR_CODE, fingerprint, transformers_code
from raypipe.job import HfSpec, JobSpec
from raypipe.job.cluster import ClusterSpec, load_cluster
from raypipe.job.field_types import FP8
from raypipe.job.requested_schedule import base_schedule
from raypipe.partition.report import ModelPiece, Partition, make_partition
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
    if job.parallel.vocabulary == "split":
        raise SpecError("parallel.vocabulary", "split, and costs are of layers whose head is whole", "use whole")
    schedule = base_schedule(job.parallel, job.train.batch)
    described = None if cluster is None else load_cluster(cluster).of_one_kind(str(cluster))
    measured = None if profile is None else load_profile(profile)
    if measured is not None:
        check_profile(job, measured)
    pieces, tensor_ranks, *_ = job_pieces(divided(job, 1))
    if measured is None:
        where = this_machine(job.train.dtype, schedule.devices) if described is None else described
        works = [tensor_rank.work for tensor_rank in tensor_ranks]
        measured = analytic_profile(
            works, where, job.train.dtype, [job.parallel.microbatch], job.train.optimizer, job.train.momentum > 0
        )
    measured = as_job_runs(measured, job.train, job.parallel)
    return make_partition(
        pieces, measured, schedule, job.parallel.microbatch, memory_bytes, job.train.optimizer, job.train.momentum
    )


def divided(job: JobSpec, size: int, sequence: bool = False) -> JobSpec:
    """Return the job with its layers shared by groups of ``size``, and whole experts: what copies that divide these pay
    follows from that (``cost.experts``). ``sequence``: with the positions between layers shared, too."""
    changes = {"tensor": size, "experts": 1, "sequence_parallel": sequence}
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=changes)})


def job_pieces(job: JobSpec, alike: bool = False) -> JobPieces:
    """Return the model's pieces, their work and how it runs in slices: from the cache, or from the model.

    Where the job divides layers, the first two are a member's share.

    Args:
        job: the job.
        alike: repeat one block of a deep model for those that are alike (``_of_alike``). What crosses cuts behind
            them has that one's name then.

    Raises:
        SpecError: the model does not divide.
        CaptureError: it cannot be captured.
    """
    job = _computed(job)
    key = pieces_key(job)
    for one in _names(key)[: 1 + alike]:
        kept = load_pieces(one)
        if kept is not None:
            return kept
    try:
        repeated = _of_alike(job) if alike else None
        result = repeated or captured_pieces(job)
    except (SpecError, CaptureError) as error:
        if key is not None and job.parallel.tensor > 1:  # every search for a plan asks whether layers divide
            save_pieces(key, _Refused("SpecError" if isinstance(error, SpecError) else "CaptureError", error.args))
        raise
    if key is not None:
        save_pieces(key if repeated is None else f"{key}.alike", result)
    return result


def captured_pieces(job: JobSpec, more: int = 0) -> JobPieces:
    """Return what ``job_pieces`` returns, from the model; in the pieces that it has where its last block but one comes
    so many times ``more``."""
    from raypipe.data import declared_fields  # torch from here on
    from raypipe.models import build_model
    from raypipe.models.captured import CapturedModel
    from raypipe.partition.pieces import head_of, pieces_of, slicing_of, tensor_ranks_of

    fields = declared_fields(job.data)
    model = build_model(job, fields, tensor_rank=0)
    if more and isinstance(model, CapturedModel):
        model = model.as_if_deeper(more)
    slicing = slicing_of(job, model, fields)
    head = head_of(job, model) if job.parallel.tensor == 1 else None
    return JobPieces(pieces_of(model, job.parallel.microbatch), tensor_ranks_of(job, model), slicing, head)


def to_capture(job: JobSpec) -> bool:
    """Return whether ``job_pieces`` would capture the job's model, and keep what it finds for other processes."""
    key = pieces_key(_computed(job))
    return key is not None and not any((cache_folder() / f"{one}.pieces.json").exists() for one in _names(key))


def check_state(job: JobSpec, cluster: ClusterSpec) -> None:
    """Refuse a model that has yet to be captured, and whose state no division leaves room for, however it runs.

    Weights, gradients and optimizer state follow from the parameters' shapes. The captures, which say what plans need
    beside, take many times as long.

    Raises:
        SpecError: all devices together have less memory.
    """
    if not isinstance(job.model, HfSpec) or job.model.lora is not None or not to_capture(divided(job, 1)):
        return
    from raypipe.models.sources.hugging_face import HuggingFace  # torch

    train = job.train
    if HuggingFace(job.model).config.sub_configs:  # parts of it may not be read, and are not trained then
        return
    count = sum(prod(shape) for _, shape in _shapes(job.model.model_dump_json()))
    each, rooms = parameter_bytes(train.dtype, train.optimizer, train.momentum), []
    for kind in cluster.kinds:
        base, reserved = reserved_of(kind.device)
        rooms.append((kind.device.memory_gib * GIB - base - reserved.fixed_bytes, kind.devices))
    least = each.total - each.rest  # some have no more state
    state, room = float(count * least), sum(size * devices for size, devices in rooms)
    if state <= room:
        return
    ways = [] if count * (least - each.optimizer) > room else ["train.optimizer: sgd"]
    if len(rooms) == 1:
        size, devices = rooms[0]
        host = cluster.devices_per_host
        ways.append(f"at least {ceil(state / size / host) * host} devices, more for activations")
        ways.append(f"devices with {(state / devices - size) / GIB:.1f} GiB more each at least")
    why = f"no plan fits: weights, gradients and optimizer state of {count:,} parameters take {state / GIB:.1f} GiB, "
    why += f"and all {cluster.devices} devices together have {room / GIB:.1f} for them"
    raise SpecError("memory", why, f"use {', or '.join(ways or ['more devices'])}")


def _computed(job: JobSpec) -> JobSpec:
    """Return the job whose operations are captured: FP8 is for planning alone, and in some of the same operations."""
    if job.train.dtype != FP8:
        return job
    return job.model_copy(update={"train": job.train.model_copy(update={"dtype": "bfloat16-true"})})


def _names(key: str | None) -> list[str]:
    """Return the names under which pieces may be kept: of the whole model, and of one whose blocks are alike."""
    return [] if key is None else [key, f"{key}.alike"]


# The pieces of a job's model on disk, so that its partition can be looked at again without torch.
#
# Only for models whose code and configuration can be told without running any of it: the built-in GPT needs no keeping,
# and what a function builds is known only once it has run.
KEPT_AS = 10
"""Version of what is kept; increased when it changes, so that older pieces are no longer found."""
REFUSALS: dict[str, type[RequestError]] = {"SpecError": SpecError, "CaptureError": CaptureError}
"""Errors that are kept, in place of the pieces of a model whose layers cannot be divided."""


class JobPieces(NamedTuple):
    """A job's model as the planner knows it."""

    pieces: tuple[ModelPiece, ...]
    tensor_ranks: tuple[TensorRankWork, ...]
    """The work of each piece; a tensor rank's share of it where the job divides layers."""
    slicing: Slicing
    head: HeadProfile | None = None
    """The head at the end of the last piece, where devices can divide it."""


class _Refused(NamedTuple):
    kind: Literal["SpecError", "CaptureError"]
    args: tuple[str, ...]


@cache
def _documents() -> TypeAdapter[JobPieces | _Refused]:
    return TypeAdapter(JobPieces | _Refused)


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
    if job.train.loss_chunk_tokens is not None:
        asked["loss_chunk_tokens"] = job.train.loss_chunk_tokens
    if job.parallel.tensor > 1:
        asked["tensor"] = job.parallel.tensor
        asked["sequence_parallel"] = job.parallel.sequence_parallel
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
    """The pieces kept under a key, and their work; None if there are none.

    Raises:
        SpecError, CaptureError: the model was refused.
    """
    path = cache_folder() / f"{key}.pieces.json"
    try:
        kept = _documents().validate_json(read_regular(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        notify(f"passed over {path}: {error.strerror}")
        return None
    except ValueError as error:
        notify(f"passed over {path}: it is damaged ({type(error).__name__}: {error})")
        return None
    if isinstance(kept, _Refused):
        raise REFUSALS[kept.kind](*kept.args)
    return kept


def save_pieces(key: str, found: JobPieces | _Refused) -> None:
    """Keep them, or why there are none; a folder that can't be written is no error."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_whole(cache_folder() / f"{key}.pieces.json", _documents().dump_json(found))
    except OSError as error:
        to_stderr(f"the pieces are not kept: {cache_folder()}: {error.strerror}")


# A deep model's pieces from a shallow one's: blocks that are alike are captured once, whatever their number.
#
# Capturing takes time in proportion to the layers, and a planner needs of each only what it costs. From some layer on,
# most models only repeat one: the same parameters, and the same entries in every list of the configuration that says
# something of each layer. Such a model of the transformers library is captured with three of these layers. Where the
# first two come out alike, its pieces are those of the shallow model with the second repeated; the last one may differ,
# as its results go elsewhere.


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


def _of_alike(job: JobSpec) -> JobPieces | None:
    """Return the pieces of a deep model, its work and how it runs in slices; None if its blocks are not known to be
    alike."""
    if not isinstance(job.model, HfSpec) or job.model.lora is not None or job.parallel.placement == "branches":
        return None
    from raypipe.models.sources.hugging_face import configuration  # transformers

    config = configuration(job.model.hf, job.model.config)
    depth = getattr(config, LAYERS, 0)
    if depth < DEEP or config.sub_configs:
        return None
    first = _alike_from(job.model.model_dump_json(), depth)
    # The first of those that are alike may get other inputs: where positions are divided, it does.
    fewest = first + (4 if job.parallel.tensor > 1 and job.parallel.sequence_parallel else 3)
    for few in range(fewest, first + 5):
        if few > depth // 2:
            return None
        pieces, works, slicing, head = captured_pieces(_with_layers(job, config, depth, few), depth - few)
        captured = _segments(pieces, works)
        blocks = [one for one in captured if one.block]
        path = blocks[-1].block.rpartition(".")[0] if blocks else ""
        if [one.block for one in blocks[-3:]] != [f"{path}.{n}" for n in range(few - 3, few)]:
            return None
        if blocks[-2].looks == blocks[-3].looks:
            break
    else:
        return None
    at = captured.index(blocks[-1])
    more = (blocks[-2].renamed(f"{path}.{n}") for n in range(few - 1, depth - 1))
    whole = [*captured[:at], *more, blocks[-1].renamed(f"{path}.{depth - 1}"), *captured[at + 1 :]]
    pieces = tuple(piece for one in whole for piece in one.pieces)
    every = (work for one in whole for work in one.works)
    named = tuple(
        work._replace(work=replace(work.work, name=f"{n} {piece.label}"))
        for n, (piece, work) in enumerate(zip(pieces, every, strict=True))
    )
    return JobPieces(pieces, named, slicing, head)


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
def _shapes(spec: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of a model's parameters, of an ``HfSpec`` as JSON; a tied one has its first name."""
    from raypipe.capture.meta import build_without_memory  # torch
    from raypipe.models.sources.hugging_face import HuggingFace

    model = build_without_memory(HuggingFace(HfSpec.model_validate_json(spec)).build)
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


@lru_cache(maxsize=4)
def _alike_from(spec: str, depth: int) -> int:
    """Return the first layer that all later ones are like, of an ``HfSpec`` as JSON; ``depth`` if that is not known."""
    from raypipe.models.sources.hugging_face import HuggingFace  # torch

    config = HuggingFace(HfSpec.model_validate_json(spec)).config
    lists = [value for value in config.to_dict().values() if _of_each(value, depth)]
    looks: list[list[object]] = [[value[n] for value in lists] for n in range(depth)]
    paths = set()
    for name, shape in _shapes(spec):
        parts = name.split(".")
        at = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None:
            paths.add(tuple(parts[:at]))
            if int(parts[at]) >= depth:
                return depth
            looks[int(parts[at])].append((parts[at + 1 :], shape))
    if len(paths) != 1:
        return depth
    return 1 + max((n for n in range(depth) if looks[n] != looks[-1]), default=-1)


def _segments(pieces: Pieces, works: Works) -> list[_Segment]:
    def of_blocks() -> Iterator[_Segment]:
        for block, group in groupby(zip(pieces, works, strict=True), key=lambda both: both[0].block):
            own = list(group)
            yield _Segment(block, tuple(piece for piece, _ in own), tuple(work for _, work in own))

    return list(of_blocks())
