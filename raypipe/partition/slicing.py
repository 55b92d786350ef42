"""Whether a job's samples can be cut along the sequence, as its profile records it."""

from __future__ import annotations

from collections.abc import Mapping

from raypipe.cost.profile import Slicing
from raypipe.errors import CaptureError, SpecError
from raypipe.job import JobSpec
from raypipe.models import LayeredModel
from raypipe.models.captured import CapturedModel
from raypipe.models.task import Field

VARYING = "its samples differ in length, and slices of a micro-batch are of one length"

DROPPING = (
    "its attention drops weights, and what slices take then is not computed: switch that off (attn_pdrop, "
    "attention_dropout: 0), or give the whole plan"
)
"""Scores of whole sequences are kept until the backward, those of slices are made again."""


def slicing_of(job: JobSpec, model: LayeredModel, fields: Mapping[str, Field] | None) -> Slicing:
    """Return how a model runs in slices of its samples' sequences, or why it cannot.

    Args:
        job: the job.
        model: its layers.
        fields: the raw inputs that the data's arrays provide; None for text.
    """
    positions = model.positions
    # An array of rows of one length can be read row by row; those of several lengths cannot.
    if job.data.type == "lines" or any(field.rows is None for field in (fields or {}).values()):
        return Slicing(positions=positions, refused=VARYING)
    try:
        model.slice_lengths(1)
    except (CaptureError, SpecError) as error:
        where = f"{error.where}: " if isinstance(error, CaptureError) else ""
        return Slicing(positions=positions, refused=where + error.why)
    if isinstance(model, CapturedModel) and model.drops_attention:
        return Slicing(positions=positions, refused=DROPPING)
    return Slicing(positions=positions, shortest=model.shortest_slice)
