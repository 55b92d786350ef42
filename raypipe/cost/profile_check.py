"""Check that a profile can plan a job: that it is of the job's model and dtype, and that its times are valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raypipe.cost.profile import MADE_BY, Profile, TakenFor, TaskTimes
from raypipe.errors import SpecError
from raypipe.job.model_spec import GptSpec
from raypipe.job.spec import JobSpec

AGAIN = f"profile this job: {MADE_BY}"
KINDS: tuple[tuple[str, ...], ...] = (("forward",), ("joint",), ("input_grad", "weight_grad"))
"""Tasks that take time in every model, even if they take none in some of its layers."""


def check_profile(job: JobSpec, profile: Profile) -> None:
    """Check that a profile belongs to a job and has the figures to plan it.

    Raises:
        SpecError: the profile is of another model, optimizer, number of layers or dtype, or lacks times or memory.
    """
    if profile.taken_for is not None:
        _check_taken_for(profile.taken_for, TakenFor.job(job))
    if isinstance(job.model, GptSpec) and len(profile.layers) != job.model.layers + 2:
        raise SpecError(
            "profile",
            f"has {len(profile.layers)} layers, the job's model {job.model.layers + 2} with embedding and head",
            AGAIN,
        )
    if profile.dtype != job.train.dtype:
        raise SpecError(
            "profile",
            f"was taken for {profile.dtype}, the job trains in {job.train.dtype}",
            f"profile again, or set train.dtype: {profile.dtype}",
        )
    sizes = [set(layer.times) for layer in profile.layers]
    bare = next((layer.name for layer in profile.layers if not layer.times), None)
    if bare is not None:
        raise SpecError("profile", f"holds no times of layer {bare}", "profile again")
    if any(s != sizes[0] for s in sizes):
        raise SpecError("profile", "its layers were taken at different micro-batch sizes", "profile again")
    for size in sorted(sizes[0]):
        for kinds in KINDS:
            if not sum(_seconds(layer.times[size], kinds) for layer in profile.layers) > 0:
                what = " and ".join(kinds)
                raise SpecError("profile", f"says that no layer's {what} takes any time at {size} samples", AGAIN)
    if profile.memory_bytes <= 0:
        raise SpecError("profile", "says that a device has no memory", "profile again")
    held = sum(layer.parameters for layer in profile.layers)
    if 2 * profile.tied_parameters > held:
        raise SpecError(
            "profile: tied_parameters", f"are {profile.tied_parameters} in two layers each, of {held} in all", AGAIN
        )


def _check_taken_for(theirs: TakenFor, ours: TakenFor) -> None:
    then, now = _keys(theirs), _keys(ours)
    for key in sorted({*then, *now}, key=lambda key: (key not in now, key)):
        if then.get(key) != now.get(key):
            raise SpecError(
                "profile", f"was taken for {key}: {_shown(then.get(key))}, the job has {_shown(now.get(key))}", AGAIN
            )


def _keys(taken: TakenFor) -> dict[str, Any]:
    """Return the job keys for which a profile is valid, as a job writes them."""
    return {
        **dict(_flat("model", taken.model)),
        "train.optimizer": taken.optimizer,
        "train.compile": "inductor" if taken.compiled else None,
        "parallel.activation_memory_budget": taken.activation_memory_budget,
    }


def _flat(prefix: str, keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}.{key}", value)
        else:
            yield f"{prefix}.{key}", value


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _seconds(times: TaskTimes, kinds: tuple[str, ...]) -> float:
    return float(sum(getattr(times, kind) for kind in kinds))


def doubts(job: JobSpec, profile: Profile, devices: int | None = None) -> list[str]:
    """Return warnings about a profile: assumptions that can make a prediction wrong but do not prevent a plan.

    Args:
        job: the job to plan.
        profile: the profile to plan with.
        devices: number of devices to plan for; None for those of the profile.
    """
    result = []
    if (warning := profile.noise.warning()) is not None:
        result.append(warning)
    if profile.source == "measured" and profile.taken_for is None:
        result.append("warning: the profile does not say of which model it was taken; profile again to be sure")
    sizes = sorted(profile.layers[0].times)
    wish = job.parallel.given.get("microbatch") if job.parallel.auto else None
    if len(sizes) == 1 and sizes[0] != wish and job.train.batch > 1:
        result.append(
            f"warning: the profile has times of micro-batches of {sizes[0]} only; times of smaller ones are assumed to "
            "be proportional, larger ones are not considered: profile with --microbatches 1,2,4,8"
        )
    if profile.source == "measured" and devices is not None and devices > profile.devices:
        hosts = "" if len(profile.placed.of_first(profile.devices)) > 1 else "; links between hosts are assumed as fast"
        result.append(f"warning: {devices} devices are planned with the measurements of {profile.devices}{hosts}")
    return result
