"""Quick profiles on disk: a job's second start on the same devices need not measure everything again.

Beside captured models (``partition.cache``), under a key of all that a profile depends on and that can be known without
measuring. What cannot be known so, whether the machine is as fast as it was, ``profiling`` finds out by measuring once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import ray
import torch

from raypipe.atomic_write import write_whole
from raypipe.cost.profile import Profile, load_profile
from raypipe.errors import SpecError
from raypipe.graph.captured_files import cache_folder
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel

MEASURED_AS = 2
"""Counted up when what is measured, or how, changes: older profiles are not found any more."""


def profile_path(job: JobSpec, model: LayeredModel, sizes: Sequence[int], devices: int) -> Path:
    """Where the quick profile of this model, on ``devices`` of this cluster, is kept; Ray must be initialised."""
    train = job.train
    key = {
        "measured_as": MEASURED_AS,
        "torch": torch.__version__,
        "model": job.model.model_dump(mode="json"),
        # A model of the user's own may be another one under the same name.
        "layers": [
            (name, model.flops[i], model.parameters(i), sorted(model.reads((i,))), repr(_crossing(model, i)))
            for i, name in enumerate(model.names)
        ],
        "train": [train.dtype, train.optimizer, train.momentum, train.clip is None, train.deterministic, train.batch],
        "data": job.data.type,
        "sizes": list(sizes),
        "devices": devices,
        "nodes": sorted(
            sorted((what, count) for what, count in node["Resources"].items() if what in ("CPU", "GPU"))
            for node in ray.nodes() if node["Alive"]
        ),
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder().with_name("profiles") / f"{digest[:32]}.json"


def _crossing(model: LayeredModel, i: int) -> object:
    return model.crossing(i, 1) if i < model.count - 1 else ()


def read_kept(path: Path) -> tuple[Profile, str] | None:
    """The profile that is kept there, and its age in words; None if there is none that can be read."""
    if not path.exists():
        return None
    try:
        return load_profile(path), age(time.time() - path.stat().st_mtime)
    except (SpecError, OSError):
        return None


def keep(path: Path, profile: Profile) -> None:
    """Write it; a folder that can't be written is no error: then the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (profile.model_dump_json(indent=1) + "\n").encode())
    except OSError:
        return


def age(seconds: float) -> str:
    """How long ago.

    >>> age(20), age(90 * 60), age(50 * 3600)
    ('less than a minute', '90 minutes', '2 days')
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return "less than a minute" if seconds < 60 else "a minute"
