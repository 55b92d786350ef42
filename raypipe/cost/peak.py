"""The peak of a device that is running: of its description in ``cluster/devices/``, or as the user says."""

from __future__ import annotations

import os
import re

from raypipe.errors import SpecError
from raypipe.files import shipped
from raypipe.job.cluster import DEVICES, load_cluster
from raypipe.job.field_types import arithmetic

GIVEN = "RAYPIPE_PEAK_TFLOPS"
"""Environment variable with the peak of a device that no description names, in 10^12 operations per second."""


def peak_flops_s(device: str, dtype: str) -> float | None:
    """Peak operations per second of the device that calls itself so, in this arithmetic; None where nobody knows.

    >>> peak_flops_s("NVIDIA A100-SXM4-80GB", "bfloat16")
    312000000000000.0
    """
    try:
        if given := os.environ.get(GIVEN):
            return float(given) * 1e12
    except ValueError:
        return None
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


def words_of(device: str) -> frozenset[str]:
    """What a device's name says, however drivers and data sheets spell it.

    >>> sorted(words_of("NVIDIA H100 80GB HBM3") - words_of("H100 SXM5 80 GB"))
    []
    >>> sorted(words_of("NVIDIA H100 PCIe") - words_of("H100 SXM5 80 GB"))
    ['PCIE']
    """
    words = re.findall(r"[A-Z0-9]+", re.sub(r"(\d) +GB", r"\1GB", device.upper()))
    return frozenset(word for word in words if word != "NVIDIA" and not word.startswith("HBM"))
