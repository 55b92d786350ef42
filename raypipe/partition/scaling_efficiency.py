"""The scaling efficiency of data parallelism, from the planner's costs of compute and all-reduces on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raypipe.job.cluster import ClusterSpec
from raypipe.job.load import load_job
from raypipe.partition.job_costs import job_profile
from raypipe.plan.choose import choose


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
