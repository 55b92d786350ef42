"""Types that all sections of a job file share: the strict base model and the usual kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = 2**53
"""Largest whole number: above it, floats, which JSON readers and costs use, are no longer exact."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, lt=1)]
WireDtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes that messages may be cast to."""
WIDTH = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by dtype."""


class Spec(BaseModel):
    """Base of all file sections. It is frozen and strict: an unknown key or a value of the wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)
