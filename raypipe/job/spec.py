"""The job file as typed data: each field says what it means, in which unit, and what is allowed.

Keys and their spelling are CONTRACT.md's. A spec is immutable and complete: defaults are filled in, so that what
a run directory records is what ran. Each section has a file of its own; rules between fields are in ``check``; reading
files is in ``load``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from raypipe.errors import SpecError
from raypipe.job.check import problems
from raypipe.job.data_spec import DataSpec
from raypipe.job.field_types import Spec
from raypipe.job.model_spec import ModelSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.train_spec import TrainSpec


class JobSpec(Spec):
    """One training job: the whole file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Used for the run directory and in the Ray dashboard: letters, digits, dot, dash, underscore."""
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelSpec = ParallelSpec()

    @property
    def tokens_per_sample(self) -> int:
        """Most tokens of a sample of text; 1 for a sample of arrays."""
        return (self.model.sequence or 1) if self.data.type != "arrays" else 1

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.train.batch // self.parallel.microbatch

    @model_validator(mode="after")
    def _rules(self) -> JobSpec:
        for key, why, fix in problems(self.model, self.data, self.train, self.parallel):
            raise SpecError(key, why, fix)  # pydantic passes it on as it is
        return self
