"""raypipe plans, runs and explains pipeline-parallel training on Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.trainer import Callback, PipelineTrainer, init

__version__ = "0.1.0"
__all__ = ["Callback", "PipelineTrainer", "__version__", "init"]


def __getattr__(name: str) -> Any:
    # Import on first use: they need torch and Ray, and ``import raypipe`` must need neither.
    if name in ("Callback", "PipelineTrainer", "init"):
        return getattr(importlib.import_module("raypipe.trainer"), name)
    raise AttributeError(f"module 'raypipe' has no attribute '{name}'")
