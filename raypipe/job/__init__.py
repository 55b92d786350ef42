"""The job file and the cluster file as typed, checked data. Imports neither torch nor Ray."""

from raypipe.job.cluster import ClusterSpec, load_cluster
from raypipe.job.data_spec import DataSpec
from raypipe.job.model_spec import CapturedSpec, GivenSpec, GptSpec, HfSpec, ImportSpec, ModelSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec, job_from, load_job
from raypipe.job.train_spec import TrainSpec

__all__ = [
    "CapturedSpec",
    "ClusterSpec",
    "DataSpec",
    "GivenSpec",
    "GptSpec",
    "HfSpec",
    "ImportSpec",
    "JobSpec",
    "ModelSpec",
    "ParallelSpec",
    "TrainSpec",
    "job_from",
    "load_cluster",
    "load_job",
]
