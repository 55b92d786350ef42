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
"""By the key in metrics.jsonl, the name and the factor. Other figures of a validation keep their names."""


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row of metrics.jsonl; those that it does not have are left out.

    >>> figures({"step": 3, "loss": 2.5, "bubble_ratio": 0.25, "mfu": None})
    {'loss': 2.5, 'bubble(%)': 25.0}
    >>> figures({"step": 3, "val_loss": 2.25, "val_accuracy": 0.5})
    {'val_loss': 2.25, 'val_accuracy': 0.5}
    """
    named = {key: FIGURES.get(key, (key, 1.0)) for key in row if key in FIGURES or key.startswith("val_")}
    return {name: row[key] * factor for key, (name, factor) in named.items() if row[key] is not None}
