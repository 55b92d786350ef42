"""The ``data`` section of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypipe.job.field_types import Positive, Spec


class DataSpec(Spec):
    """The data to train on."""

    type: Literal["bytes", "lines", "arrays"] = "bytes"
    """``bytes``: text files are read as bytes, one token each, in windows of equal length. ``lines``: each line of such
    files (or ``text`` of each record of a ``.jsonl`` file) is a sample, and lengths differ. ``arrays``: a file of named
    arrays with one row per sample; rows may differ in length, and the names are the model's arguments and
    ``labels``."""
    path: Annotated[str, Field(min_length=1)]
    """``stdlib`` (the sources of Python's standard library), or a text file, a folder or a glob; for arrays, an
    ``.npz`` or ``.safetensors`` file."""
    held_out: Annotated[str, Field(min_length=1)] | None = None
    """A second file of arrays to validate on; without it, a tenth of the samples is held out."""
    pad_to_multiple_of: Positive = 8
    """If samples differ in length, a micro-batch is padded to its longest sample, rounded up to a multiple of this, so
    that there are few different shapes."""
    mask: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the bytes that are masked for a masked language model to predict."""
