"""This machine as a cluster of single cores, its rates measured in a moment: costs for whoever describes no other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from raypipe.job.cluster import ClusterSpec, LinkModel, cluster_from
from raypipe.job.field_types import arithmetic

SIZE = 64
"""Rows of the matrices whose product is timed: few enough for the library to use one thread, as a stage does."""
LARGE = 1 << 23
"""Numbers that are copied: more than caches hold."""
LAYER_OVERHEAD_US = 100
"""Of a block's forward of some thirty operators, each of which torch takes a few microseconds to start."""
CHANNEL = LinkModel(latency_us=11, bandwidth_gb_s=11)
"""raypipe's shared-memory channel between two processes, as ``raypipe profile`` measures it."""


def this_machine(dtype: str, devices: int, timed: bool = True) -> ClusterSpec:
    """Return a cluster of so many devices of one processor core each, sharing the machine's memory.

    ``timed``: measure its rates, in an eighth of a second; without, they are placeholders beside its memory.
    """
    product, copy = _rates(dtype) if timed else (1e-6, 1e-3)
    link = CHANNEL.model_dump()
    device = {
        "name": "one core of this machine",
        "memory_gib": host_memory_bytes() / 2**30 / devices,
        "peak_tflops": {arithmetic(dtype): 2 * SIZE**3 / product / 1e12},
        "efficiency": 1.0,
        "memory_gb_s": 2 * 4 * LARGE / copy / 1e9,
        "layer_overhead_us": LAYER_OVERHEAD_US,
    }
    hosts = {"hosts": 1, "devices_per_host": devices, "inside": link, "between": link}
    return cluster_from({"name": "this machine", **hosts, "device": device})


def host_memory_bytes() -> float:
    """Bytes of memory of this host, or what a container is given of it."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, float(text))
    return total


def _rates(dtype: str) -> tuple[float, float]:
    """Return the seconds of a product of two matrices, and of a copy of ``LARGE`` numbers."""
    kind = np.float64 if dtype == "float64" else np.float32
    a, large, other = np.ones((SIZE, SIZE), kind), np.ones(LARGE, np.float32), np.zeros(LARGE, np.float32)
    return _seconds(lambda: a @ a, 400), _seconds(lambda: np.copyto(other, large), 2)


def _seconds(run: Callable[[], object], times: int) -> float:
    """Return processor time, as others may be at work on the machine; the least of a few samples."""
    samples = []
    for _ in range(8):
        began = time.process_time()
        for _ in range(times):
            run()
        samples.append((time.process_time() - began) / times)
    return max(min(samples), 1e-9)
