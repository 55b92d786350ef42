"""The job file as typed data; each field documents its meaning, unit and allowed values.

CONTRACT.md defines the keys. A spec is immutable and complete: defaults are filled in, so that a run directory records
exactly what ran. Each section has its own file; rules between fields are in ``check``; ``load`` reads files.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, model_validator

from raypipe.errors import SpecError
from raypipe.job.data_spec import DataSpec
from raypipe.job.field_types import WIDTH, ReduceDtype, Spec, WireDtype
from raypipe.job.model_spec import ModelSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.rules.check import problems
from raypipe.job.train_spec import TrainSpec


class JobSpec(Spec):
    """A training job."""

    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the job, used for the run directory and in the Ray dashboard: letters, digits, dot, dash, underscore."""
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelSpec = ParallelSpec()

    @property
    def tokens_per_sample(self) -> int:
        """Largest number of tokens of a text sample; 1 for arrays."""
        return (self.model.sequence or 1) if self.data.type != "arrays" else 1

    @property
    def microbatches(self) -> int:
        """Number of micro-batches in a step, over all replicas."""
        return self.train.batch // self.parallel.microbatch

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> JobSpec:
        """Check the rules; with the step of a plan as context, for that one."""
        for key, why, fix in problems(self.model, self.data, self.train, self.parallel, info.context):
            raise SpecError(key, why, fix)  # pydantic does not wrap this exception
        if self.parallel.auto and self.train.optimizer == "adafactor":  # asked of the planner, as if the file said so
            whole = self.parallel.model_copy(update={"shard": "none", "tensor": 1})
            object.__setattr__(self, "parallel", whole)
        return self


def reduce_dtype(train: TrainSpec, parallel: ParallelSpec) -> ReduceDtype | None:
    """Return the dtype in which gradients are summed over replicas; None if it is their own."""
    own = {"bfloat16-true": "bfloat16", "bfloat16": "float32"}.get(train.dtype, train.dtype)
    return parallel.reduce_dtype if parallel.reduce_dtype != own else None


def message_dtype(train: TrainSpec, parallel: ParallelSpec) -> WireDtype | None:
    """Return what floating-point messages between devices are cast to; None if they are sent as the stages make them.

    Under bfloat16 autocast the stages exchange a float32 residual stream, of which each matrix product reads bfloat16
    anyway; so bfloat16 is the default there, as in other pipelines, at half the bytes.
    """
    if parallel.wire_dtype is None:
        return "bfloat16" if train.dtype == "bfloat16" else None
    return parallel.wire_dtype if WIDTH[parallel.wire_dtype] < WIDTH[train.crossing_dtype] else None


def compiles_first(train: TrainSpec, parallel: ParallelSpec) -> bool:
    """Return whether stages are compiled before the first step rather than beside the first steps.

    So it is where the job asks for it, and where no step may run eagerly.
    """
    return train.compile != "none" and (train.compile_first or needs_compiled(train, parallel))


def needs_compiled(train: TrainSpec, parallel: ParallelSpec) -> bool:
    """Return whether no step may run eagerly where stages can be compiled.

    So it is where the bits of a run must not depend on when compilation ends, and where memory is planned for less than
    eager stages keep.
    """
    return train.deterministic or parallel.activation_memory_budget < 1
