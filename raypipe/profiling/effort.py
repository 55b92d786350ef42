"""The effort of a profile: thorough for a file, quick for a job that is about to start; quick ones are kept."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import torch

from raypipe.capture.captured import cache_folder
from raypipe.cost.collectives import Kind
from raypipe.cost.profile import Profile, load_profile
from raypipe.errors import SpecError
from raypipe.files import write_whole
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel


@dataclass(frozen=True, slots=True)
class Effort:
    """How often everything is measured."""

    warm_up: int
    """Steps before timing, in which gradients, optimizer state and the allocator's pools are allocated."""
    least: int
    """Smallest number of timed steps per order of tasks, however long they take."""
    most: int
    """Largest number of timed steps per order of tasks."""
    budget_s: float
    """Seconds per order of tasks, after which no step beyond ``least`` begins."""
    passes: int
    """Number of passes over all sizes, every second one backwards. A machine's speed varies within seconds, and sizes
    are compared with each other."""
    pairs: int
    """Number of comparisons of one working device with all devices working."""
    every_memory: bool
    """Whether to measure memory at every micro-batch size; otherwise at the smallest and the middle one, through which
    a line is fitted."""
    again: int
    """How often disturbed measurements are repeated at most."""
    patience_s: float
    """Seconds after which no measurement is repeated."""
    brief: bool
    """Whether to report progress only once."""
    message_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    repeats: int
    collectives: tuple[Kind, ...]
    whole_s: float = math.inf
    """Seconds for all micro-batch sizes, or ``STEPS`` steps of the job where these take longer. Sizes that do not fit
    into them are not measured."""
    once: bool = False
    """Whether every order of tasks is measured in a single step, its memory too: see ``one_step``."""


STEPS = 1.5
"""Steps of the job that a profile may take; with what comes before and after it, less than two."""


def one_step(effort: Effort) -> Effort:
    """Return the effort for layers whose tasks take so long that neither a clock's nor an allocator's noise matters.

    The first micro-batch, which allocates the gradients, warms up for those that follow it.
    """
    return replace(effort, warm_up=0, least=1, most=1, pairs=1, again=0, once=True)


THOROUGH = Effort(
    warm_up=2,
    least=3,
    most=40,
    budget_s=1.0,
    passes=2,
    pairs=7,
    every_memory=True,
    again=2,
    patience_s=120.0,
    brief=False,
    message_bytes=(1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23),
    collective_bytes=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25),
    repeats=25,
    collectives=("all_reduce", "all_gather", "reduce_scatter"),
)
QUICK = Effort(
    warm_up=1,
    least=2,
    most=10,
    budget_s=0.15,
    passes=1,
    pairs=3,
    every_memory=False,
    again=1,
    patience_s=10.0,
    brief=True,
    message_bytes=(1 << 12, 1 << 17, 1 << 21),
    collective_bytes=(1 << 17, 1 << 22),
    repeats=20,
    collectives=("all_reduce",),
    whole_s=20.0,
)


# A cache of quick profiles, so that a job's next start on the same devices need not measure everything again.
#
# It is beside the captured models (``capture.captured``). A key covers everything that a profile depends on and that
# is known without measuring. Whether the machine is still as fast is found by one measurement (``profile_job``).


MEASURED_AS = 6
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
                repr(model.crossing(i, 1) if i < model.count - 1 else ()),
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
            model.packed and job.parallel.context > 1,
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
