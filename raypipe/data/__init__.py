"""Training data: the driver finds, checks and prepares it once; each worker reads the rows it needs."""

from raypipe.data.arrays import Arrays, declared_fields, known_fields, prepare_arrays
from raypipe.data.dataset import (
    Dataset,
    check_placeholders,
    counts_tokens,
    extend_order,
    has_short_steps,
    is_prepared,
    open_data,
    prepare_data,
    reads_bytes,
    tokens_per_sample,
    validation_places,
    validation_weights,
)
from raypipe.data.ragged import Ragged, columns_of, flat
from raypipe.data.sample_order import write_order
from raypipe.data.text import Corpus, prepare

__all__ = [
    "Arrays",
    "Corpus",
    "Dataset",
    "Ragged",
    "check_placeholders",
    "columns_of",
    "counts_tokens",
    "declared_fields",
    "extend_order",
    "flat",
    "has_short_steps",
    "is_prepared",
    "known_fields",
    "open_data",
    "prepare",
    "prepare_arrays",
    "prepare_data",
    "reads_bytes",
    "tokens_per_sample",
    "validation_places",
    "validation_weights",
    "write_order",
]
