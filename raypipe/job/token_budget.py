"""Token budgets: how many tokens a step takes, how many a row of packed documents holds, and how many rows that makes.

The documents of a step follow from the seed, the step and ``train.tokens_per_step`` alone; rows, micro-batches and
copies divide them afterwards. So the number of rows has to be enough for any documents, before any is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PER_STAGE = 4
"""Rows of a step for each stage of a copy, where nobody says how many tokens one holds: a bubble of at most a fifth,
(stages - 1) / (rows + stages - 1)."""
PLANNED_ROWS = 32
"""Rows of a step where the planner chooses the stages: any power of two of copies and micro-batches up to it fits."""


class TokenBudget(NamedTuple):
    """How the documents of a step are taken and packed."""

    tokens: int
    """Most tokens of a step."""
    row_tokens: int
    """Most tokens of a row."""
    rows: int
    """Rows of a step."""
    copies: int
    """Data-parallel copies, among which the rows of a step are divided."""
    even: int
    """Length at which a document's attention takes as long as all else, in tokens."""


def rows_needed(tokens: int, row_tokens: int) -> int:
    """Return a number of rows into which first fit packs any documents of at most ``tokens`` together.

    No document is longer than a row. First fit leaves no two rows that would fit into one, so k rows hold more than
    ``k * row_tokens / 2`` tokens (Johnson 1973).

    >>> rows_needed(65536, 8192), rows_needed(100, 100), rows_needed(100, 60)
    (15, 1, 3)
    """
    return max(1, -(-2 * tokens // row_tokens) - 1)


def with_rows(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job file's content with the rows and the tokens of a row that its token budget implies.

    What is no number, or missing, stays for the job's own checks.
    """
    train, parallel = job.get("train"), job.get("parallel")
    if not isinstance(train, Mapping) or not _count(train.get("tokens_per_step")):
        return job
    tokens: int = train["tokens_per_step"]
    parallel = parallel if isinstance(parallel, Mapping) else {"auto": parallel == "auto"}
    stages, copies, each = (parallel.get(key, 1) for key in ("stages", "replicas", "microbatch"))
    row: Any = train.get("microbatch_tokens", "auto")
    rows: Any = train.get("batch")
    if not all(map(_count, (stages, copies, each))) or not (row == "auto" or _count(row)):
        return job
    unit = copies * each
    if rows is None and row == "auto":
        rows = PLANNED_ROWS if parallel.get("auto") else PER_STAGE * stages
        rows = -(-rows // each) * unit if not parallel.get("auto") else -(-rows // unit) * unit
    elif rows is None:
        rows = -(-rows_needed(tokens, row) // unit) * unit
    if row == "auto" and _count(rows):
        row = min(tokens, -(-2 * tokens // (rows + 1)))
    return {**job, "train": {**train, "batch": rows, "microbatch_tokens": row}}


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
