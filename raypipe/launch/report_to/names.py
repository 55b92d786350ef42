"""The figures of a run by the names that users of other trainers know, torchtitan's and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = float(1 << 30)
PERCENT = 100.0
FIGURES: dict[str, tuple[str, float]] = {
    "loss": ("loss", 1.0),
    "val_loss": ("val_loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "lr": ("lr", 1.0),
    "tokens_per_s": ("tps", 1.0),
    "step_s": ("time/step(s)", 1.0),
    "mfu": ("mfu(%)", PERCENT),
    "bubble_ratio": ("bubble(%)", PERCENT),
    "data_wait_share": ("data_wait(%)", PERCENT),
    "memory_bytes": ("memory/max_reserved(GiB)", 1.0 / GIB),
}
"""By the key in metrics.jsonl, the name and the factor."""


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row of metrics.jsonl; those that it does not have are left out.

    >>> figures({"step": 3, "loss": 2.5, "bubble_ratio": 0.25, "mfu": None})
    {'loss': 2.5, 'bubble(%)': 25.0}
    """
    found = ((key, row.get(key)) for key in FIGURES)
    return {FIGURES[key][0]: value * FIGURES[key][1] for key, value in found if value is not None}
