"""A cache of quick profiles, so that a job's next start on the same devices need not measure everything again.

It is beside the captured models (``capture.captured``). A key covers everything that a profile depends on and that
is known without measuring. Whether the machine is still as fast is found by one measurement (``profile_job``).
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
from raypipe.capture.captured import cache_folder
from raypipe.cost.profile import Profile, load_profile
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel

MEASURED_AS = 5
"""Version of the measurements; increased when they change, so that older profiles are no longer found."""


def profile_path(job: JobSpec, model: LayeredModel, sizes: Sequence[int], devices: int) -> Path:
    """Return the path of the cached profile of this model on ``devices`` of this cluster; Ray must be initialised."""
    train = job.train
    key = {
        "measured_as": MEASURED_AS,
        "torch": torch.__version__,
        "model": job.model.model_dump(mode="json"),
        # A user's function may build another model under the same name.
        "layers": [
            (
                name,
                model.flops[i],
                model.parameters(i),
                model.trained_parameters(i),
                sorted(model.reads((i,))),
                repr(_crossing(model, i)),
            )
            for i, name in enumerate(model.names)
        ],
        "train": [
            train.dtype,
            train.optimizer,
            train.momentum,
            train.clip is None,
            train.deterministic,
            train.batch,
            train.compile == "inductor",
            job.parallel.activation_memory_budget,
        ],
        "data": job.data.type,
        "sizes": list(sizes),
        "devices": devices,
        "nodes": sorted(
            sorted((what, count) for what, count in node["Resources"].items() if what in ("CPU", "GPU"))
            for node in ray.nodes()
            if node["Alive"]
        ),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder().with_name("profiles") / f"{digest[:32]}.json"


def _crossing(model: LayeredModel, i: int) -> object:
    return model.crossing(i, 1) if i < model.count - 1 else ()


def read_kept(path: Path) -> tuple[Profile, str] | None:
    """Read a cached profile; return it with its age in words, or None if it is missing or unreadable."""
    if not path.exists():
        return None
    try:
        return load_profile(path), age(time.time() - path.stat().st_mtime)
    except (SpecError, OSError):
        return None


def keep(path: Path, profile: Profile) -> None:
    """Cache a profile. If the folder cannot be written, nothing happens, and the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (profile.model_dump_json(indent=1) + "\n").encode())
    except OSError:
        return


def age(seconds: float) -> str:
    """Express an age in words.

    >>> age(20), age(90 * 60), age(50 * 3600)
    ('less than a minute', '90 minutes', '2 days')
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return "less than a minute" if seconds < 60 else "a minute"
