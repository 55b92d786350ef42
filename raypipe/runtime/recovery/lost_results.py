"""The results of calls of which some were lost with the worker that died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from raypipe.errors import RaypipeError
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.update.ledger import Facts


def outcomes(refs: Sequence[Any]) -> list[Any | None]:
    """Return the results of calls that have ended, None for those that failed."""
    result: list[Any | None] = []
    for ref in refs:
        try:
            result.append(ray.get(ref))
        except (RayError, RaypipeError):
            result.append(None)
    return result


def completed(results: Sequence[StepResult | None], facts: Facts) -> list[StepResult]:
    """Put what every device has told the others of a step in the place of results that were lost."""
    told = zip(facts.loss_sum, facts.samples, facts.norm_squared, strict=True)
    return [
        one
        if one is not None
        else StepResult(loss, samples, norm, np.zeros((0, 2)), 0, 0, 0.0, 0, StepMemory(0, {}), False)
        for one, (loss, samples, norm) in zip(results, told, strict=True)
    ]
