"""The ``data`` section of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypipe.job.field_types import Positive, Spec


class DataSpec(Spec):
    """The data to train on."""

    type: Literal["bytes", "lines", "arrays", "documents"] = "bytes"
    """``bytes``: text files are read as bytes, one token each, in windows of equal length. ``lines``: each line of such
    files (or ``text`` of each record of JSON lines) is a sample, and lengths differ. ``arrays``: a file of named
    arrays with one row per sample; rows may differ in length, and the names are the model's arguments and
    ``labels``. ``documents``: a column of Parquet, JSONL, text or Hugging Face files, streamed through Ray Data,
    tokenised while training goes on and packed into samples of ``model.sequence`` tokens."""
    path: Annotated[str, Field(min_length=1)]
    """``stdlib`` (the sources of Python's standard library), or a text file, a folder or a glob; for arrays, an
    ``.npz`` or ``.safetensors`` file; for documents, a file, a folder or a glob of ``.parquet``, ``.arrow``,
    ``.jsonl`` or ``.txt`` files, or a folder that ``save_to_disk`` of Hugging Face's datasets wrote. Text and JSON may
    be compressed (``.gz``, ``.zst``)."""
    held_out: Annotated[str, Field(min_length=1)] | None = None
    """What to validate on instead: a second file of arrays, of which otherwise a tenth of the samples is held out; or a
    second path of documents, of which otherwise every 32nd is, and the last tenth of a block's only one."""
    column: Annotated[str, Field(min_length=1)] = "text"
    """The column, or the key of JSON objects, that holds a document: its text, or a list of token numbers."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Local folder with the ``tokenizer.json`` of Hugging Face's tokenizers; null: each byte of a document is a
    token."""
    block_mb: Annotated[float, Field(gt=0, le=1024)] = 8.0
    """MiB of documents that are read, tokenised and packed at once."""
    shuffle_blocks: Annotated[int, Field(ge=1, le=1024)] = 8
    """Blocks in memory whose samples are shuffled among one another; the order of the blocks is shuffled as a whole."""
    num_workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Blocks of documents that are tokenised at the same time, by processes beside those that train."""
    pad_to_multiple_of: Positive = 8
    """If samples differ in length, a micro-batch is padded to its longest sample, rounded up to a multiple of this, so
    that there are few different shapes."""
    group_by_length: bool = False
    """For arrays whose rows differ in length: take rows of similar lengths into the same mini-batch, so that less is
    padding. Every 50 mini-batches of the shuffled rows are sorted by length, as Hugging Face's sampler does."""
    long_documents: Literal["refuse", "split", "truncate", "drop"] = "refuse"
    """With ``train.tokens_per_step``: what becomes of a document longer than ``train.microbatch_tokens``. ``refuse``:
    the job is refused. ``split``: its parts are documents of their own. ``truncate``: its end is left out. ``drop``: it
    is left out."""
    order: Annotated[str, Field(min_length=1)] | None = None
    """For arrays with ``held_out``: an ``.npy`` file with the row numbers of each step, ``[steps, batch]``, instead of
    shuffled rows. A step may have fewer rows, with numbers below 0 after them; its loss is the mean over its own."""
    mask: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the bytes that are masked for a masked language model to predict."""
