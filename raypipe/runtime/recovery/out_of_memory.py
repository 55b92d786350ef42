"""Have the next attempt at a run use a plan that needs less memory, where a device ran out of it."""

from __future__ import annotations

from pathlib import Path

from ray.exceptions import RayActorError

from raypipe.data import known_fields
from raypipe.errors import DeviceError
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.observe.run_log import RunLog
from raypipe.plan.less_memory import less_memory
from raypipe.plan.plan import load_plan
from raypipe.runtime.recovery.failure import describe

KILLED = "NODE_OUT_OF_MEMORY"
"""How Ray says that its memory monitor has killed a process, because its node has hardly any memory left."""


def ran_out(cause: BaseException) -> bool:
    """Return whether a failure (a result of ``own_error``) is that of a device without memory."""
    if isinstance(cause, DeviceError):
        return cause.kind == "memory"
    return isinstance(cause, RayActorError) and KILLED in str(cause)


def plan_with_less(job: JobSpec, directory: Path, log: RunLog, cause: BaseException) -> None:
    """Replace the plan of the run in ``directory``; what changes, or that nothing can, is an event."""
    plan = load_plan(directory / "plan.json")
    statistics = build_model(job, known_fields(directory / "data"), parallel=plan.parallel).batch_statistics
    found = less_memory(job, plan, statistics)
    if found is None:
        log.event("notice", message="a device ran out of memory, and no plan for these devices needs less")
        return
    smaller, change = found
    smaller.save(directory / "plan.json")
    log.event("out_of_memory", message=describe(cause), change=change)
