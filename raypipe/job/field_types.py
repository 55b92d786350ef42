"""Types that all sections of a job file share: the strict base model and the usual kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = 2**53
"""Largest whole number: above it, floats, which JSON readers and costs use, are no longer exact."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
CountKey = Annotated[int, Field(ge=0, le=MOST, strict=False)]
"""A ``Count`` that is a key; keys of JSON are text."""
MOST_DEVICES = 100_000
"""More devices than in any cluster that has run Ray. Every device's order is built before a run starts."""
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
"""Devices, or hosts."""
Share = Annotated[float, Field(ge=0, lt=1)]
WireDtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes that messages may be cast to."""
ReduceDtype = Literal["float32", "bfloat16"]
"""Dtypes in which gradients may be summed."""
FP8 = "fp8"
"""The ``train.dtype`` whose linear layers compute in FP8; all else of it is that of bfloat16-true."""
WIDTH = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "bfloat16-true": 2, FP8: 2}
"""Bytes of a value that products read and write, by dtype or ``train.dtype``."""
WEIGHT_WIDTH = {**WIDTH, "bfloat16": 4, "float16": 4}
"""Bytes of a weight, of its gradient and of a value of the residual stream, by ``train.dtype``: under 16-bit autocast
they stay float32."""


def arithmetic(dtype: str) -> str:
    """Return the dtype of the matrix products of ``train.dtype``.

    >>> arithmetic("bfloat16-true"), arithmetic("fp8")
    ('bfloat16', 'float8')
    """
    return "float8" if dtype == FP8 else dtype.removesuffix("-true")


class Spec(BaseModel):
    """Base of all file sections. It is frozen and strict: an unknown key or a value of the wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)
