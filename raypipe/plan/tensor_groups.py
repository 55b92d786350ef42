"""Layers, experts and sequences that devices share, as dimensions of the plan search: one predictor for every way.

A group that shares layers counts as one device in a profile of its own (``cost/tensor.py``), copies that divide experts
hold fewer of them in theirs (``cost/experts.py``), and copies that divide sequences have a part of each in theirs
(``cost/sizes.py``), so each way has its own predictor. The grids of all ways share one queue, ordered by their lower
bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from raypipe.cost.experts import with_divided_experts
from raypipe.cost.profile import Profile, even_order
from raypipe.job.parallel_spec import ParallelSpec, check_expert_order
from raypipe.job.spec import JobSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import divisors
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid


class Sharing(NamedTuple):
    """How devices share layers, experts and sequences."""

    tensor: int = 1
    """Devices of a group that shares each layer."""
    sub_pipelined: bool = False
    """A micro-batch runs in two halves that overlap compute with the other's all-reduces."""
    experts: int = 1
    """Copies that divide the experts of a layer."""
    context: int = 1
    """Copies that divide each sequence."""
    sequence_parallel: bool = False
    """Devices of a group divide positions between the layers that they share."""


ALONE = Sharing()
"""Devices share nothing."""


def sharing_of(grid: Grid | ParallelSpec) -> Sharing:
    """Return what the devices of a grid share."""
    return Sharing(*(getattr(grid, key) for key in Sharing._fields))


def of_experts(profiles: Mapping[Sharing, Profile], asked: int | None) -> dict[Sharing, Profile]:
    """Return the profiles of plans that divide experts as a job asks, if it does.

    Where there is none of so many copies (costs were measured compiled, or do not say what is the experts'), plans have
    the costs of undivided experts.
    """
    if asked is None:
        return dict(profiles)
    result = {sharing: own for sharing, own in profiles.items() if sharing.experts == asked}
    whole = {sharing: own for sharing, own in profiles.items() if sharing.experts == 1 and not sharing.sub_pipelined}
    return result or {sharing._replace(experts=asked): own for sharing, own in whole.items()}


def expert_counts(train: TrainSpec, experts: Iterable[int], devices: int, hosts: Iterable[int]) -> list[int]:
    """Return the numbers of copies, from 2, that may divide the experts of a job's model.

    Those that divide the experts of each layer, and the mini-batch; inside a host those that divide its devices, else
    whole hosts; no more than there are devices. None of a model without experts, or whose job has what cannot be
    combined with them.

    Args:
        train: of the job.
        experts: of each layer that has some.
        devices: of the cluster.
        hosts: devices of each host.
    """
    common, each = gcd(*experts), set(hosts)
    if not common or train.updates_alone or train.cuda_graphs != "none":
        return []
    return [
        n
        for n in divisors(common)
        if 1 < n <= devices and not train.batch % n and not any(n % k and k % n for k in each)
    ]


def measured_with_experts(job: JobSpec, profile: Profile, devices: int) -> dict[Sharing, Profile]:
    """Return a measured profile as copies have it that divide experts, by how many do.

    Of the number that a job asks for alone, where it does. None where layers were measured compiled: divided experts
    are not, and what they take then is not known.

    Raises:
        SpecError: the experts do not divide by what the job asks for, its ``imbalance`` cannot be, or its
            ``expert_order`` is not of these layers' experts.
    """
    given = job.parallel.given if job.parallel.auto else {}
    asked = given.get("experts")
    found = ((n, layer.experts) for n, layer in enumerate(profile.layers))
    by_layer = {f"layer {n}": own.work.experts for n, own in found if own is not None}
    counts = list(by_layer.values())
    compiled = profile.taken_for is not None and profile.taken_for.compiled
    if not counts or compiled or asked == 1 or given.get("tensor", 1) > 1:
        return {}
    sizes = expert_counts(job.train, counts, devices, profile.placed.of_first(devices)) if asked is None else [asked]
    imbalance = job.parallel.imbalance if "imbalance" in job.parallel.given else None
    orders = job.parallel.expert_order or None
    if orders is not None:
        check_expert_order(orders, by_layer)
    return {Sharing(experts=n): with_divided_experts(profile, n, imbalance, orders) for n in sizes}


def expert_order(profile: Profile, group: int) -> tuple[tuple[int, ...], ...]:
    """Return which experts of each layer go to which of ``group`` copies, as even as measured loads allow.

    Nothing where no loads were measured, or ascending orders are as even.
    """
    layers = [own.loads or (1.0,) * own.work.experts for layer in profile.layers if (own := layer.experts) is not None]
    orders = [even_order(loads, group) for loads in layers] if group > 1 else []
    if not any(orders):
        return ()
    return tuple(order or tuple(range(len(loads))) for order, loads in zip(orders, layers, strict=True))


@dataclass(frozen=True, slots=True)
class Judges:
    """The predictors of a choice: one for each way in which devices share layers, experts and sequences."""

    by: Mapping[Sharing, Predictor]

    def of(self, what: Grid) -> Predictor:
        """The predictor whose devices share as much."""
        return self.by[sharing_of(what)]

    def promising(self, grids: Iterable[Grid]) -> list[Grid]:
        """Return grids by the lower bound on the step of every candidate on them."""
        return sorted(grids, key=lambda grid: self.of(grid).least_on(grid))
