"""Strict JSON: Python's ``json`` writes ``NaN`` and ``Infinity``, which are not valid JSON."""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(value: object, **options: Any) -> str:
    """Return ``json.dumps(value)`` with null for every number that is not finite.

    >>> strict_json({"loss": float("nan"), "times": [1.0, float("inf")]})
    '{"loss": null, "times": [1.0, null]}'
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
