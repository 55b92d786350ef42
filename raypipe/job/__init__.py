"""What the user asks for: the job file, read and checked. Imports neither torch nor Ray."""

from raypipe.job.load import job_from, load_job
from raypipe.job.spec import DataSpec, JobSpec, ModelSpec, ParallelSpec, TrainSpec

__all__ = ["DataSpec", "JobSpec", "ModelSpec", "ParallelSpec", "TrainSpec", "job_from", "load_job"]
