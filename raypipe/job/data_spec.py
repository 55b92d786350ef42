"""What to train on: the ``data`` section of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypipe.job.field_types import Positive, Spec


class DataSpec(Spec):
    """What to train on."""

    type: Literal["bytes", "lines", "arrays"] = "bytes"
    """``bytes``: text files read as bytes, one token each, in windows of one length. ``lines``: each line of such files
    (or ``text`` of each record of a ``.jsonl`` file) is a sample of its own length. ``arrays``: a file of named arrays,
    one row per sample, whose lengths may differ; the names are those of the model's arguments, and ``labels``."""
    path: Annotated[str, Field(min_length=1)]
    """``stdlib`` (this Python's own library sources), or a file, a folder or a glob of text; for arrays, an ``.npz`` or
    ``.safetensors`` file."""
    held_out: Annotated[str, Field(min_length=1)] | None = None
    """A second file of arrays to validate on; without it, a tenth of the samples is held out."""
    pad_to_multiple_of: Positive = 8
    """Where samples have their own lengths, a micro-batch is padded to its longest one's, rounded up to a multiple of
    this: so that few shapes exist."""
    mask: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the bytes that a masked language model is to guess."""
