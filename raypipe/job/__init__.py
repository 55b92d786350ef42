"""What the user asks for: the job file and the cluster file, read and checked. Imports neither torch nor Ray."""

from raypipe.job.cluster import ClusterSpec, load_cluster
from raypipe.job.load import job_from, load_job
from raypipe.job.spec import DataSpec, GptSpec, JobSpec, ModelSpec, ParallelSpec, TrainSpec

__all__ = [
    "ClusterSpec",
    "DataSpec",
    "GptSpec",
    "JobSpec",
    "ModelSpec",
    "ParallelSpec",
    "TrainSpec",
    "job_from",
    "load_cluster",
    "load_job",
]
