"""The job file as typed data; each field documents its meaning, unit and allowed values.

CONTRACT.md defines the keys. A spec is immutable and complete: defaults are filled in, so that a run directory records
exactly what ran. Each section has its own file; rules between fields are in ``rules``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from raypipe.errors import SpecError
from raypipe.files import short
from raypipe.job.data_spec import DataSpec
from raypipe.job.field_types import WIDTH, ReduceDtype, Spec, WireDtype
from raypipe.job.model_spec import MODEL_KINDS, ModelSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.reading import describe, first_problem, parse_yaml, read_text
from raypipe.job.rules.check import problems
from raypipe.job.train_spec import TrainSpec, with_rows


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

    @model_validator(mode="before")
    @classmethod
    def _rows_of_tokens(cls, job: Any) -> Any:
        return with_rows(job) if isinstance(job, Mapping) else job

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> JobSpec:
        """Check the rules; with the step of a plan as context, for that one."""
        for key, why, fix in problems(self.model, self.data, self.train, self.parallel, info.context):
            raise SpecError(key, why, fix)  # pydantic does not wrap this exception
        if self.parallel.auto and self.train.updates_whole:  # asked of the planner, as if the file said so
            divided = {"shard": "none"} if self.train.updates_alone else {}
            whole = self.parallel.model_copy(update={**divided, "tensor": 1})
            object.__setattr__(self, "parallel", whole)
        return self


def reduce_dtype(train: TrainSpec, parallel: ParallelSpec) -> ReduceDtype | None:
    """Return the dtype in which gradients are summed over replicas; None if it is their own."""
    own = train.crossing_dtype
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


EXAMPLE = "jobs/quickstart.yaml"
"""A complete job file that errors point to."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file, apply ``key.path=value`` overrides (with values in YAML) and check the result.

    Raises:
        SpecError: ``where`` is the file and the key, or ``--set key`` if an override is wrong.
    """
    text = read_text(Path(path), "job", EXAMPLE)
    return job_from(parse_yaml(text, str(path)), str(path), overrides)


def job_from(mapping: object, where: str = "job", overrides: Sequence[str] = ()) -> JobSpec:
    """Check a job given as plain data (as YAML gives it); ``where`` names its origin in errors.

    Raises:
        SpecError: the first problem found; unknown keys come first, because they often cause the others.
    """
    if not isinstance(mapping, Mapping):
        raise SpecError(where, f"holds {describe(mapping)} instead of keys and values", f"see {EXAMPLE}")
    data, overridden = _with_overrides(mapping, overrides)

    def place(key: str) -> str:
        culprit = next((k for k in overridden if f"{key}.".startswith(f"{k}.")), None)
        return f"--set {key}" if culprit else f"{where}: {key}"

    try:
        return JobSpec.model_validate(data)
    except SpecError as error:
        raise SpecError(place(error.where), error.why, error.fix) from None
    except ValidationError as invalid:
        key, why, fix = first_problem(invalid, JobSpec, EXAMPLE, {"model": MODEL_KINDS})
        raise SpecError(place(key), why, fix) from None


def _with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Return a copy of the mapping with ``key.path=value`` set, and the keys that were set."""
    data: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}
    seen: set[str] = set()
    for text in overrides:
        if data.get("parallel") == "auto":
            data["parallel"] = {"auto": True}  # so that single keys can be set
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise SpecError(f"--set {short(text)}", "is not key.path=value", "for example --set train.steps=100")
        inner = data
        for part in parts[:-1]:
            step = inner.setdefault(part, {})
            if not isinstance(step, dict):
                raise SpecError(f"--set {key}", f'"{part}" is a value and holds no keys', "check the key's path")
            inner = step
        inner[parts[-1]] = parse_yaml(value, f"--set {key}")
        seen.add(".".join(parts))
    return data, seen
