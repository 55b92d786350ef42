"""The partition of a job: its model, its schedule's stages, the costs asked for."""

from __future__ import annotations

from pathlib import Path

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.profile import load_profile
from raypipe.cost.profile_check import check_profile
from raypipe.cost.stages import as_exchanged
from raypipe.job.cluster import load_cluster
from raypipe.job.requested_schedule import base_schedule
from raypipe.job.spec import JobSpec
from raypipe.partition.cached_pieces import Kept, load_pieces, pieces_key, save_pieces
from raypipe.partition.report import Partition, make_partition
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
        measured = analytic_profile(works, where, job.train.dtype, [job.parallel.microbatch], job.train.optimizer,
            job.train.momentum > 0,
        )  # fmt: skip
    measured = as_exchanged(measured, job.train, job.parallel)
    return make_partition(
        pieces, measured, schedule, job.parallel.microbatch, memory_bytes, job.train.optimizer, job.train.momentum
    )


def divided(job: JobSpec, size: int) -> JobSpec:
    """The job with its layers shared by groups of ``size``."""
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": size})})


def job_pieces(job: JobSpec) -> Kept:
    """The model's pieces, their work and how it runs in slices: from the cache, or from the model itself.

    Where the job divides layers, the first two are a member's share.

    Raises:
        SpecError: the model does not divide.
        CaptureError: it cannot be captured.
    """
    key = pieces_key(job)
    kept = None if key is None else load_pieces(key)
    if kept is not None:
        return kept
    from raypipe.data import declared_fields  # torch from here on
    from raypipe.models import build_model
    from raypipe.partition.pieces import pieces_of, tensor_ranks_of
    from raypipe.partition.slicing import slicing_of

    fields = declared_fields(job.data)
    model = build_model(job, fields, tensor_rank=0)
    slicing = slicing_of(job, model, fields)
    found = Kept(pieces_of(model, job.parallel.microbatch), tensor_ranks_of(job, model), slicing)
    if key is not None:
        save_pieces(key, found)
    return found
