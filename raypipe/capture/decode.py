"""Decode the arguments of a captured operation from plain data (``graph/calls.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raypipe.graph.calls import Plain


def decode(value: Plain, operands: Mapping[int | str, Any], device: torch.device | str) -> Any:
    """Return an argument; ``operands`` holds results by operation and sources by name."""
    if isinstance(value, list):
        return [decode(item, operands, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((key, content),) = value.items()
    if key in ("op", "of"):
        return operands[content]
    if key == "float":
        return float(content)
    if key == "device":
        return torch.device(device)
    return getattr(torch, content)
