"""The peak of a device that is running: of its description in ``cluster/devices/``, or as the user says."""

from __future__ import annotations

import math
import os
import re

from raypipe.errors import SpecError
from raypipe.files import shipped, short
from raypipe.job.cluster import DEVICES, load_cluster
from raypipe.job.field_types import arithmetic

GIVEN = "RAYPIPE_PEAK_TFLOPS"
"""Environment variable with the peak of a device that no description names, in 10^12 operations per second."""


MOST_TFLOPS = 1e9


def peak_flops_s(device: str, dtype: str) -> float | None:
    """Peak operations per second of the device that calls itself so, in this arithmetic; None where nobody knows.

    Raises:
        SpecError: ``RAYPIPE_PEAK_TFLOPS`` is not a number above 0.

    >>> peak_flops_s("NVIDIA A100-SXM4-80GB", "bfloat16")
    312000000000000.0
    """
    if given := os.environ.get(GIVEN):
        return _given(given)
    wanted = words_of(device)
    for file in sorted((shipped("cluster") / DEVICES).glob("*.yaml")) if wanted else ():
        try:
            described = load_cluster(file).device
        except SpecError:  # one of the user's own beside ours
            continue
        # Drivers leave words out: "NVIDIA H200" is an "H200 SXM5 141 GB". One that they add is another device.
        if wanted <= words_of(described.name):
            return next(
                (peak * 1e12 for name, peak in described.peak_tflops.items() if name == arithmetic(dtype)), None
            )
    return None


def _given(text: str) -> float:
    """Read what ``GIVEN`` holds, in operations per second.

    Raises:
        SpecError: it is not a number above 0, or not a plausible one.

    >>> _given("312")
    312000000000000.0
    """
    try:
        peak = float(text)
    except ValueError:
        peak = math.nan
    if not 0 < peak <= MOST_TFLOPS:
        why = f'"{short(text)}" is not a peak in TFLOP/s'
        raise SpecError(GIVEN, why, f"set it to a number above 0 and at most {MOST_TFLOPS:g}, or unset it")
    return peak * 1e12


def words_of(device: str) -> frozenset[str]:
    """Return what a device's name says, however drivers and data sheets spell it.

    >>> sorted(words_of("NVIDIA H100 80GB HBM3") - words_of("H100 SXM5 80 GB"))
    []
    >>> sorted(words_of("NVIDIA H100 PCIe") - words_of("H100 SXM5 80 GB"))
    ['PCIE']
    """
    words = re.findall(r"[A-Z0-9]+", re.sub(r"(\d) +GB", r"\1GB", device.upper()))
    return frozenset(word for word in words if word != "NVIDIA" and not word.startswith("HBM"))
