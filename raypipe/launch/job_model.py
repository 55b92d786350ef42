"""The model of the job that is being prepared, built once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.job.spec import JobSpec

if TYPE_CHECKING:
    from raypipe.models import Field, LayeredModel


class JobModel:
    """Builds a job's model and caches it.

    With a fixed ``parallel.tensor``, layers are one tensor rank's share; where the planner chooses, they are complete.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self._built: list[tuple[Mapping[str, Field] | None, LayeredModel]] = []

    @cached_property
    def declared(self) -> LayeredModel:
        """The model for the data that the job names.

        Raises:
            SpecError: the data cannot be read, or the model does not exist or does not fit the data.
            CaptureError: the model cannot be captured.
        """
        from raypipe.data import declared_fields

        return self._for(declared_fields(self.job.data))

    def prepared(self, data: Path) -> LayeredModel:
        """Build the model for the data prepared in a folder; a resumed run keeps these even if its job names others.

        Raises:
            SpecError, CaptureError: as ``declared``.
        """
        from raypipe.data import known_fields

        return self._for(known_fields(data))

    def _for(self, fields: Mapping[str, Field] | None) -> LayeredModel:
        from raypipe.models import build_model

        for known, model in self._built:
            if known == fields:
                return model
        model = build_model(self.job, fields, tensor_rank=None if self.job.parallel.auto else 0)
        self._built.append((fields, model))
        return model
