"""The certificate of a plan: how far its step is at most from the best of any cut, placement and order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

from raypipe.cost.collectives import collective_seconds
from raypipe.cost.hosts import Placed
from raypipe.cost.kinds import kinds_of_positions, room_bytes
from raypipe.cost.memory import ParameterBytes, parameter_bytes
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import crowding, reduced_width
from raypipe.plan.certificate.assigned import Assigned, assigned_bound
from raypipe.plan.certificate.closed import closed_bound, spread_bound
from raypipe.plan.certificate.instance import Instance, Kind, Resource
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.shape import Innermost

RESOURCES: tuple[Resource, ...] = ("memory", "link", "barrier")
"""What may bind besides compute."""
BINDS = 1e-3
"""A resource binds where the bound falls by more than this share without it."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A lower bound on the step of every plan that divides the devices as this one does."""

    bound_s: float
    """No plan of as many devices a copy, copies and samples a micro-batch has a shorter step, whatever its cut into
    runs of layers, its stages' devices, its order and what it recomputes. Where no layer of the plan is on several
    devices of a copy, this is said of such plans."""
    binds: Resource
    """The resource without which the bound falls most."""

    def gap(self, step_s: float) -> float:
        """How much longer a step is than the bound, as a share of it: the best plan is shorter by no more."""
        return max(0.0, step_s / self.bound_s - 1.0) if self.bound_s > 0 else float("inf")


@dataclass(slots=True)
class Certifier:
    """Certificates of one job's plans on one kind of group; plans of one shape share theirs."""

    judge: Predictor
    _instances: dict[object, Instance] = field(default_factory=dict)
    _known: dict[object, Certificate] = field(default_factory=dict)

    def of(self, p: Prediction, seconds: float = 0.0) -> Certificate:
        """The certificate of a plan; with ``seconds`` of CP-SAT's deterministic time, a tighter one."""
        key = self._key(p)
        result = self._known.get(key)
        if result is None or (seconds > 0 and p.form.replicas == 1):
            i = self.instance(p)
            if p.form.replicas > 1:
                bound = min(spread_bound(i), p.step_s)
                result = Certificate(bound, _binding(i, spread_bound(i), spread_bound))
            else:
                bound = min(self.assigned(p, seconds).bound_s, p.step_s)
                if result is None or bound > result.bound_s:
                    result = Certificate(bound, _binding(i, closed_bound(i), closed_bound))
            self._known[key] = result
        return replace(result, bound_s=min(result.bound_s, p.step_s))

    def assigned(self, p: Prediction, seconds: float) -> Assigned:
        """The bound by integer programming and the assignment of layers to devices that goes with it."""
        return assigned_bound(self.instance(p), p.step_s, seconds)

    def instance(self, p: Prediction) -> Instance:
        """The plan's devices and micro-batches without its cut, placement and order."""
        key = self._key(p)
        if key not in self._instances:
            self._instances[key] = _instance(self.judge, p)
        return self._instances[key]

    def _key(self, p: Prediction) -> object:
        c, form = p.candidate, p.form
        return (
            c.grid,
            form.size,
            form.replicas > 1,
            form.versions,
            _without_b(self.judge, p),
            c.shard,
            c.shard_group,
            waits_for_all(self.judge, p),
        )


def waits_for_all(judge: Predictor, p: Prediction) -> bool:
    """Return whether a barrier lies between two steps of every plan of this kind.

    With ``update: auto`` some may run ahead of the global norm, so that none can be taken to wait.
    """
    return judge.train.needs_norm and p.candidate.update == "wait"


@dataclass(slots=True)
class Certifiers:
    """Certificates of the plans of all kinds of group."""

    judges: Judges
    _by: dict[int, Certifier] = field(default_factory=dict)

    def of(self, p: Prediction) -> Certifier:
        """The one that certifies this plan."""
        judge = self.judges.of(p.candidate)
        return self._by.setdefault(id(judge), Certifier(judge))

    def certificate(self, p: Prediction, seconds: float = 0.0) -> Certificate:
        """See ``Certifier.of``."""
        return self.of(p).of(p, seconds)


def _without_b(judge: Predictor, p: Prediction) -> int:
    """Layers at the start that the plan's costs take to have no input gradient; others are bounded with as many.

    They are those before the first trained one, and, where a stage leaves out a B that it could have, that stage's.
    """
    first = _frozen_first(judge.profile)
    if p.form.skips_first_b:
        return max(first, next((own.stop for own in p.cut if own.stop > first), 0))
    return first


def _frozen_first(profile: Profile) -> int:
    """Layers before the first that trains anything."""
    return next((n for n, layer in enumerate(profile.layers) if layer.trained), 0)


def _binding(i: Instance, bound: float, of: object) -> Resource:
    """The resource without which a bound falls most; compute where none makes much of a difference."""
    assert callable(of)
    falls: list[tuple[float, Resource]] = [(1.0 - of(i.without(name)) / bound, name) for name in RESOURCES if bound > 0]
    most, name = max(falls, default=(0.0, "compute"))
    return name if most > BINDS else "compute"


def _instance(judge: Predictor, p: Prediction) -> Instance:
    c, form, profile = p.candidate, p.form, judge.profile
    size = float(form.size)
    samples = c.microbatch * size
    flushes = form.versions == "flush"
    each = parameter_bytes(profile.dtype, judge.train.optimizer, judge.train.momentum)
    positions = kinds_of_positions(profile, c.stages, c.replicas)
    names = sorted({tuple(kind.device for kind in kinds) for kinds in positions})
    busy = profile.placed.busy(c.stages * c.replicas)
    by_name = {tuple(kind.device for kind in kinds): kinds for kinds in positions}
    # A position that several kinds of device have, in different copies, is as slow as the slowest of them.
    kinds = tuple(
        Kind.of([_kind(one, samples, busy, _without_b(judge, p)) for one in by_name[name]], max) for name in names
    )
    overheads = judge.overheads(c)
    waits = waits_for_all(judge, p)
    state, full = _state(profile, each, c.level, c.shard_group)
    first = _frozen_first(profile)
    needed = profile.layers[first:]
    return Instance(
        kinds=kinds,
        kind_of=tuple(names.index(tuple(kind.device for kind in own)) for own in positions),
        room=room_bytes(profile, c.stages, c.replicas),
        microbatches=round(c.microbatches / size),
        state=state,
        full_state=full,
        kept=(0.0,) * first + tuple(layer.kept_bytes * samples for layer in needed),
        waiting=(0.0,) * first + tuple(layer.waiting * samples for layer in needed),
        message=_message(profile, samples),
        frozen_first=first,
        barrier=waits,
        flushes=flushes,
        after=overheads.norm_s if waits else 0.0,
        all_reduce_per_update=_all_reduce(profile, c.stages, c.replicas) if c.shard == "none" else 0.0,
    )


def _kind(profile: Profile, samples: float, busy: int, without_b: int) -> Kind:
    """The times of one kind of device; the first ``without_b`` layers have no input gradient, frozen ones no other."""
    share = crowding(profile, busy)
    times = [times_at(layer, samples) for layer in profile.layers]
    trained = _trained(profile)
    back = [0.0 if n < without_b else t.input_grad for n, t in enumerate(times)]
    whole = [
        b + (t.weight_grad if layer.trained else 0.0) for b, t, layer in zip(back, times, profile.layers, strict=True)
    ]
    return Kind(
        forward=tuple(share * t.forward for t in times),
        input_grad=tuple(share * min(b, t.joint) for b, t in zip(back, times, strict=True)),
        backward=tuple(share * min(t.joint, w) for w, t in zip(whole, times, strict=True)),
        recompute=tuple(share * t.recompute for t in times),
        update=tuple(profile.update_s_per_parameter * n for n in trained),
        overhead=profile.task_overhead_s,
    )


def _state(
    profile: Profile, each: ParameterBytes, level: int, group: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per layer, the bytes of weights and optimizer state, and of gradients as well; a tied matrix counts once.

    Frozen weights have neither gradients nor optimizer state, and shards do not divide them.
    """
    held = [layer.parameters for layer in profile.layers]
    held[-1] -= min(profile.tied_parameters, held[-1])
    trained = _trained(profile)
    frozen = [max(0, n - m) * each.weight for n, m in zip(held, trained, strict=True)]
    weight, gradient, optimizer = (
        size / (group if level >= least else 1)
        for size, least in ((each.weight, 3), (each.gradient, 2), (each.optimizer + each.master, 1))
    )
    state = tuple(n * (weight + optimizer) + rest for n, rest in zip(trained, frozen, strict=True))
    return state, tuple(one + n * gradient for one, n in zip(state, trained, strict=True))


def _trained(profile: Profile) -> list[int]:
    """Per layer, the parameters that are trained; a tied matrix counts once."""
    result = [layer.trained for layer in profile.layers]
    result[-1] -= min(profile.trained_tied, result[-1])
    return result


def _message(profile: Profile, samples: float) -> float:
    """The shortest message between two devices: after any layer but the last, over any kind's faster link."""
    links = [link for kind in profile.kinds for link in (kind.inside, kind.between)]
    sizes = [layer.sent_bytes * samples for layer in profile.layers[:-1]]
    return min((link.seconds(size) for link in links for size in sizes), default=0.0)


def _all_reduce(profile: Profile, stages: int, copies: int) -> float:
    """Least seconds of summing gradients over copies, per second of updating the same layers.

    Where times rise in proportion or by less, as those of all algorithms do without pieces, a part of the whole model
    takes at least its share of the whole's time.
    """
    if copies == 1 or (profile.collective is not None and profile.collective.piece_bytes) or profile.other_kinds:
        return 0.0
    if profile.trained_tied:  # which are summed apart
        return 0.0
    total = sum(layer.trained for layer in profile.layers)
    if total <= 0 or profile.update_s_per_parameter <= 0:
        return 0.0
    size = total * reduced_width(profile)
    placed = [Placed.of([tuple(range(stages))], copies, profile.placed, way) for way in get_args(Innermost)]
    layouts = {one.layout([d]) for one in placed for d in range(stages)}
    whole = min(collective_seconds(profile, "all_reduce", size, layout) for layout in layouts)
    return whole / (total * profile.update_s_per_parameter)
