"""The costs of a job's model on a described cluster: the built-in GPT by formulas, others by their operations."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from raypipe.capture.captured import Notify, to_stderr
from raypipe.cost.analytic import analytic_profile
from raypipe.cost.experts import divided_experts
from raypipe.cost.kinds import of_kinds
from raypipe.cost.layer_work import LayerWork
from raypipe.cost.profile import Profile
from raypipe.cost.tensor import TensorRankWork, tensor_profile
from raypipe.errors import CaptureError, SpecError
from raypipe.job.cluster import ClusterSpec
from raypipe.job.model_spec import GptSpec
from raypipe.job.parallel_spec import SEQUENCE_KEY, check_positions
from raypipe.job.spec import JobSpec, load_job
from raypipe.partition.partition_job import JobPieces, divided, job_pieces, to_capture
from raypipe.plan.choose import choose
from raypipe.plan.tensor_groups import Sharing, expert_counts
from raypipe.schedule.garbage_collection import no_collection
from raypipe.signals import fork_apart, start_apart


@no_collection()
def job_profile(job: JobSpec, cluster: ClusterSpec, experts: int = 1, pieces: JobPieces | None = None) -> Profile:
    """Return the computed profile of a job's model.

    Args:
        job: the job.
        cluster: the devices.
        experts: copies that divide the experts of each layer.
        pieces: of the undivided model, where they are known.

    Raises:
        SpecError: the device has no peak for the job's arithmetic.
        CaptureError: the model cannot be captured.
    """
    train, tied, trained_tied, slicing, head = job.train, 0, None, None, None
    model: GptSpec | list[LayerWork]
    if isinstance(job.model, GptSpec):
        model = job.model
    else:
        result = pieces or job_pieces(divided(job, 1), alike=True)
        model, slicing, head = [rank.work for rank in result.tensor_ranks], result.slicing, result.head
        tied, trained_tied = tied_values(result), tied_values(result, trained=True)
        model = [divided_experts(work, experts, job.parallel.imbalance) for work in model]
    momentum = train.momentum > 0
    profiles = [
        analytic_profile(
            model,
            kind,
            train.dtype,
            optimizer=train.optimizer,
            momentum=momentum,
            tied=tied,
            trained_tied=trained_tied,
            slicing=slicing,
            compiled=train.compile == "inductor" and experts == 1,  # divided experts stay eager
            loss_chunk=train.loss_chunk_tokens,
            head=head if experts == 1 else None,
        ).model_copy(update={"experts": experts})
        for kind in cluster.kinds
    ]
    return of_kinds(profiles)


@no_collection()
def divided_profile(
    job: JobSpec, cluster: ClusterSpec, size: int, sub_pipelined: bool = False, sequence: bool = False
) -> Profile:
    """Return the same profile with every layer shared by a group of ``size`` devices, which then counts as one device.

    ``sequence``: with the positions between layers, too.

    Raises:
        SpecError: the model, or the cluster, does not divide so.
        CaptureError: the model cannot be captured.
    """
    train, model = job.train, job.model
    tied, trained_tied = 0, None
    tensor_ranks: GptSpec | tuple[TensorRankWork, ...]
    if isinstance(model, GptSpec):
        tensor_ranks = model
        if sequence:
            check_positions([model.sequence], size)
    else:
        result = job_pieces(divided(job, size, sequence), alike=True)
        tensor_ranks, tied, trained_tied = result.tensor_ranks, tied_values(result), tied_values(result, trained=True)
    profiles = [
        tensor_profile(
            tensor_ranks,
            kind,
            train.dtype,
            size,
            sub_pipelined=sub_pipelined,
            optimizer=train.optimizer,
            momentum=train.momentum > 0,
            tied=tied,
            trained_tied=trained_tied,
            compiled=train.compile == "inductor" and not sub_pipelined,  # halves of a micro-batch stay eager
            loss_chunk=train.loss_chunk_tokens,
            sequence=sequence,
        )
        for kind in cluster.kinds
    ]
    return of_kinds(profiles)


def shared_profiles(
    job: JobSpec, cluster: ClusterSpec, notify: Notify = to_stderr, experts: Mapping[Sharing, Profile] | None = None
) -> dict[Sharing, Profile]:
    """Return the profiles of devices that share layers (``divided_profile``) or experts (``job_profile``), by what they
    share.

    Only of what the job asks for, where it does. No plan shares both: tensor parallelism would divide products of few
    rows further, and each of its sums is as large as all tokens that experts got (torchtitan#3167 dropped it).
    ``experts``: those of copies that divide experts, where they are known (``expert_profiles``).

    Raises:
        SpecError: what the job asks for does not divide the model or the cluster's hosts.
    """
    given = job.parallel.given if job.parallel.auto else {}
    asked = given.get("tensor")
    result = dict(expert_profiles(job, cluster) if experts is None else experts)
    if asked == 1 or given.get("experts", 1) > 1:
        return result
    sizes = group_sizes(cluster)
    if asked is not None and asked not in sizes:
        fix = f"use 1 or {' or '.join(map(str, sizes))}" if sizes else "use 1"
        hosts = " or ".join(str(n) for n in sorted({kind.devices_per_host for kind in cluster.kinds}))
        why = f"groups of {asked} do not divide a host of {hosts} devices"
        raise SpecError("parallel.tensor", why, fix)
    for size in sizes if asked is None else [asked]:
        sequence = bool(given.get("sequence_parallel", True))
        for halves in (False, True) if "sub_pipelined" not in given else (bool(given["sub_pipelined"]),):
            try:
                try:
                    own = divided_profile(job, cluster, size, halves, sequence)
                except SpecError as error:
                    if not sequence or error.where != SEQUENCE_KEY or "sequence_parallel" in given:
                        raise
                    sequence = False
                    own = divided_profile(job, cluster, size, halves)
                result[Sharing(size, halves, sequence_parallel=sequence)] = own
            except (SpecError, CaptureError) as error:
                if asked is not None:
                    raise
                if isinstance(error, CaptureError):
                    notify(f"no plan shares layers by {size}: {error.where}: {error.why}")
                break
    return result


LONGEST_S = 300.0
"""Seconds after which captures elsewhere are no longer waited for, and made here."""


class SharedProfiles:
    """The profiles of ``shared_profiles``, for which a process of its own captures the divided models meanwhile.

    They take as long as the whole model, which other plans need first. The last of several is left to this process
    (``help``). Where nothing is to be captured, or there is one core, no process is started.
    """

    def __init__(self, job: JobSpec, cluster: ClusterSpec) -> None:
        self._job, self._cluster = job, cluster
        self._found: dict[Sharing, Profile] | None = None
        self._captured: Callable[[], bool] | None = None
        self._left: list[JobSpec] = []
        self._until = time.monotonic() + LONGEST_S
        given = job.parallel.given if job.parallel.auto else {}
        sizes = [n for n in group_sizes(cluster) if given.get("tensor", n) == n and given.get("experts", 1) == 1]
        sequence = bool(given.get("sequence_parallel", True))
        missing = [one for one in (divided(job, n, sequence) for n in sizes) if to_capture(one)]
        if missing and (os.cpu_count() or 1) > 1:
            there = missing[:-1] or missing
            self._captured = fork_apart(lambda: capture_forked(there))
            if self._captured is None:
                program = f"from {__name__} import {capture_given.__name__}; {capture_given.__name__}()"
                given_jobs = [one.model_dump_json(exclude_unset=True) for one in there]
                process = start_apart(program, json.dumps(given_jobs).encode())
                self._captured = None if process is None else lambda: process.poll() is not None
            self._left = missing[len(there) :] if self._captured is not None else []

    @property
    def ready(self) -> bool:
        """Return whether there is nothing to wait for, or no longer."""
        return self._captured is None or self._captured() or time.monotonic() > self._until

    def help(self) -> None:
        """Capture here what is left to this process."""
        capture_all(self._left)
        self._left = []

    @cached_property
    def experts(self) -> dict[Sharing, Profile]:
        """Those of copies that divide experts, which are known with the undivided model."""
        return expert_profiles(self._job, self._cluster)

    def get(self) -> dict[Sharing, Profile]:
        """Return them, when they are ready; what could not be captured there is captured here, or refused."""
        if self._found is None:
            self.help()
            while not self.ready:
                time.sleep(0.02)
            self._found = shared_profiles(self._job, self._cluster, experts=self.experts)
        return self._found

    def of(self, sharing: Sharing) -> Profile:
        """Return that of one way to share layers, whether or not plans share them so (``divided_profile``)."""
        return divided_profile(
            self._job, self._cluster, sharing.tensor, sharing.sub_pipelined, sharing.sequence_parallel
        )


@no_collection()
def capture_all(jobs: Iterable[JobSpec]) -> None:
    """Capture the models of these jobs, so that their pieces are kept."""
    for job in jobs:
        with suppress(SpecError, CaptureError):  # who asks for it is told
            job_pieces(job, alike=True)


def capture_forked(jobs: Iterable[JobSpec]) -> None:
    """Do the same in a process that is forked (``fork_apart``)."""
    import torch

    torch.set_num_threads(1)
    capture_all(jobs)


def capture_given() -> None:
    """Capture the models of the jobs on standard input."""
    capture_all(JobSpec.model_validate_json(job) for job in json.load(sys.stdin))


def expert_profiles(job: JobSpec, cluster: ClusterSpec) -> dict[Sharing, Profile]:
    """Return the profiles of copies that divide experts, by how many do; of the number that a job asks for alone.

    Raises:
        SpecError: what the job asks for does not divide the model, or comes with tensor parallelism.
    """
    given = job.parallel.given if job.parallel.auto else {}
    asked, tensor = given.get("experts"), given.get("tensor", 1)
    if asked == 1 or (asked is None and tensor > 1):
        return {}
    if asked is None:
        if isinstance(job.model, GptSpec):
            return {}
        pieces = job_pieces(divided(job, 1), alike=True)
        counts = [own.experts for rank in pieces.tensor_ranks if (own := rank.work.experts) is not None]
        hosts = [kind.devices_per_host for kind in cluster.kinds]
        sizes = expert_counts(job.train, counts, cluster.devices, hosts)
        return {Sharing(experts=n): job_profile(job, cluster, n, pieces) for n in sizes}
    if tensor > 1:
        why = f"plans of tensor: {tensor} and experts: {asked} are not costed: groups of tensor ranks would divide "
        why += "products of few rows further, and sum up all tokens that experts got"
        raise SpecError("parallel.experts", why, "use tensor: 1, experts: 1, or give the whole plan")
    profile = job_profile(job, cluster, asked)
    if not any(layer.exchanged_bytes for layer in profile.layers):
        raise SpecError("parallel.experts", "the model has no layer of experts that can be divided", "use experts: 1")
    return {Sharing(experts=asked): profile}


def tied_values(found: JobPieces, trained: bool = False) -> int:
    """Count the values that the first and the last piece share; ``trained``: only those that are trained."""
    first, last = found.pieces[0], found.pieces[-1]
    if first is last:
        return 0
    shared = {name for name, _ in last.parameters} - set(first.frozen if trained else ())
    return sum(count for name, count in first.parameters if name in shared)


def group_sizes(cluster: ClusterSpec) -> list[int]:
    """Sizes of groups that share layers: groups stay inside a host, over whose links they sum in every layer
    (Narayanan et al. 2021, arXiv:2104.04473, takeaway 1)."""
    counts = [kind.devices_per_host for kind in cluster.kinds]
    return [size for size in range(2, min(counts) + 1) if not any(count % size for count in counts)]


def scaling_efficiency(path: Path, cluster: ClusterSpec, workers: Iterable[int]) -> dict[int, float]:
    """Return T_1 / T_N for each number N of data-parallel workers, every one with the job's own batch.

    A worker is one device. T_N is the planner's prediction for N whole copies of the model that all-reduce their
    gradients; T_1 that for one.

    Args:
        path: job file; ``train.batch`` is the batch of one worker, and ``parallel.microbatch``, if given, what it
            computes at once.
        cluster: the devices; as many as needed are taken of its kind.
        workers: values of N.

    Raises:
        SpecError: the job or the cluster does not fit, for example a device that cannot hold the model.
    """
    alone = _step_s(path, cluster, 1)
    return {n: 1.0 if n == 1 else min(1.0, alone / _step_s(path, cluster, n)) for n in sorted(set(workers))}


def _step_s(path: Path, cluster: ClusterSpec, workers: int) -> float:
    job = load_job(path)
    microbatch = job.parallel.given.get("microbatch") if job.parallel.auto else job.parallel.microbatch
    wished = ["auto=true", "schedule=1f1b", "stages=1", f"replicas={workers}"]
    wished += [] if microbatch is None else [f"microbatch={microbatch}"]
    overrides = [f"train.batch={job.train.batch * workers}", "parallel={}", *(f"parallel.{each}" for each in wished)]
    whole = load_job(path, overrides)
    decision = choose(whole, job_profile(whole, cluster.resized(workers)), workers, top=1, search_s=0)
    assert decision.plan.predicted_step_s is not None  # a plan that was chosen has been predicted
    return decision.plan.predicted_step_s
