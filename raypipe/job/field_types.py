"""What all parts of a job file share: how strict they are, and the usual kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = 2**53
"""Of a whole number: above, the numbers of JSON readers and of costs, which are floats, are no longer exact."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, lt=1)]
WireDtype = Literal["bfloat16", "float16", "float32"]
"""What messages may be cast to."""
WIDTH = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes of a value."""


class Spec(BaseModel):
    """Strict and frozen: a misspelt key, or a string where a number belongs, is an error and not a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)
