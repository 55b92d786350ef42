"""Clusters with several kinds of device: one profile of all kinds, and what each position of a placement can hold.

Hosts are numbered kind by kind, the fastest kind first, and devices host by host, so that a plan that needs fewer
devices leaves the slow ones out, and the first stages, of which 1F1B keeps most micro-batches, are on fast devices.
Which devices a position of a placement has is said by ``stages.Placed.device``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypipe.cost.hosts import Placed
from raypipe.cost.profile import LayerProfile, Profile, TaskTimes
from raypipe.errors import SpecError

_TASKS = ("forward", "input_grad", "weight_grad", "joint", "recompute")


def of_kinds(profiles: Sequence[Profile]) -> Profile:
    """Join profiles of one job, each of the hosts of one kind, to one of the whole cluster.

    A single profile is returned as it is.

    Raises:
        SpecError: they have no micro-batch size in common, or are not of the same layers.
    """
    if len(profiles) == 1:
        return profiles[0]
    first = profiles[0]
    for other in profiles[1:]:
        if len(other.layers) != len(first.layers) or other.dtype != first.dtype:
            raise SpecError("profile", f"{other.device} and {first.device} have other layers", "profile one job")
    sizes = set.intersection(*(set(layer.times) for p in profiles for layer in p.layers))
    if not sizes:
        raise SpecError(
            "profile", "no micro-batch size was measured on every kind of device", "profile smaller micro-batches"
        )
    same = [_at_sizes(p, sizes) for p in profiles]
    largest = max(sizes)

    def seconds(profile: Profile) -> tuple[float, float, str]:
        times = [layer.times[largest] for layer in profile.layers]
        return sum(t.forward + t.joint for t in times), -profile.memory_bytes, profile.device

    fastest, *others = sorted(same, key=seconds)
    hosts, kinds = list[int](), list[int]()
    for kind, profile in enumerate((fastest, *others)):
        own = profile.placed.of_first(profile.devices)
        hosts += own
        kinds += [kind] * len(own)
    return Profile.model_validate(
        {
            **dict(fastest),
            "devices": sum(hosts),
            "hosts": tuple(hosts),
            "kind_of_host": tuple(kinds),
            "other_kinds": tuple(others),
        }
    )


def _at_sizes(profile: Profile, sizes: set[int]) -> Profile:
    def layer(one: LayerProfile) -> LayerProfile:
        return one.model_copy(update={"times": {size: one.times[size] for size in sorted(sizes)}})

    return profile.model_copy(update={"layers": tuple(map(layer, profile.layers))})


def least_times(profile: Profile) -> Profile:
    """Return a profile of one kind whose layers take, for each task, the least time of any kind: for lower bounds."""
    if not profile.other_kinds:
        return profile

    def least(times: Sequence[TaskTimes]) -> TaskTimes:
        return times[0].model_copy(update={task: min(getattr(t, task) for t in times) for task in _TASKS})

    layers = tuple(
        same[0].model_copy(update={"times": {n: least([layer.times[n] for layer in same]) for n in same[0].times}})
        for same in zip(*(kind.layers for kind in profile.kinds), strict=True)
    )
    return profile.kinds[0].model_copy(update={"layers": layers})


def kinds_of_positions(profile: Profile, positions: int, copies: int) -> list[tuple[Profile, ...]]:
    """Return the kinds of device, in all copies, of each of the ``positions`` devices of a data-parallel copy."""
    if not profile.other_kinds:
        return [(profile,)] * positions
    placed, kinds = Placed.of([tuple(range(positions))], copies, profile.placed), profile.kinds
    return [tuple(kinds[kind] for kind in sorted(placed.kinds((p,)))) for p in range(positions)]


def capacities(profile: Profile, positions: int, copies: int) -> tuple[float, ...]:
    """Return the memory in bytes of each device of a data-parallel copy: the least of its position in all copies."""
    return _least(profile, positions, copies, lambda kind: kind.memory_bytes)


def room_bytes(profile: Profile, positions: int, copies: int) -> tuple[float, ...]:
    """Return what ``capacities`` leaves to the model: without what each device's process takes."""
    return _least(profile, positions, copies, lambda kind: kind.memory_bytes - kind.process_bytes)


def process_bytes(profile: Profile, positions: int, copies: int) -> tuple[float, ...]:
    """Return what the process of each device of a data-parallel copy takes, so that ``capacities`` holds for it."""
    rooms, whole = room_bytes(profile, positions, copies), capacities(profile, positions, copies)
    return tuple(all_of_it - room for all_of_it, room in zip(whole, rooms, strict=True))


def _least(profile: Profile, positions: int, copies: int, value: Callable[[Profile], float]) -> tuple[float, ...]:
    return tuple(min(map(value, kinds)) for kinds in kinds_of_positions(profile, positions, copies))
