"""Least time that a candidate's step can take, from a few array operations: what lets a search skip most candidates.

Never above the true value, for any order of the same tasks on the same placement; a test compares them.

Memory is a bound on time as well. Activations are alive from a forward to its backward, which is at least the way
through all later stages and back, whatever the order; so a device with room for few of them works on few at a time
(Little 1961: those alive on average are the rate times how long each lives), or recomputes. ``least_seconds_in_memory``
says so of a cut in stages, ``certificate.closed.MemoryTime`` of any cut.

Seconds and bytes of a cut's stages are sums over runs of layers of what each layer takes. They are those of
``cost.stages`` and ``cost.memory`` but for messages, which take the faster link here, and collectives and updates,
which take nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.experts import least_exchange_seconds
from raypipe.cost.memory import kept_bytes, last_workspace, parameter_bytes
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import FIELDS, times_at, times_of_stages
from raypipe.cost.stages import narrow_bytes
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.step_time import StepOverheads
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, StageGraph, backwards
from raypipe.schedule.kinds import Kind
from raypipe.schedule.sharding import copies_of_experts

Array = NDArray[np.float64]
Cut = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The times of a ``CostTable`` that bounds read."""

    forward: Array
    input_grad: Array
    weight_grad: Array
    recompute: Array
    links: Array
    update: Array
    all_reduce: Array
    gather: Array
    reduce_scatter: Array
    attention: Array
    attention_grad: Array
    """The parts that grow along a sequence: nothing, as no micro-batch is in slices here."""

    def by_kind(self, kind: Kind) -> Array:
        """Seconds of F, B or W."""
        return {"F": self.forward, "B": self.input_grad}.get(kind, self.weight_grad)


@dataclass
class StageArrays:
    """Sums over layers of one profile of one kind of device."""

    profile: Profile
    train: TrainSpec
    _times: dict[int, dict[str, Array]] = field(default_factory=dict)
    _sizes: dict[str, Array] = field(default_factory=dict)

    def times(self, microbatch: int) -> dict[str, Array]:
        """Per field of ``TaskTimes``, the seconds of each layer; layers that are alike are looked up once.

        F, B and R of experts or sequences that copies divide also wait for these, at least as long as the fastest
        layout takes.
        """
        if microbatch not in self._times:
            layers, kinds = self.profile.layers, times_of_stages(self.profile.layers).kinds
            known = {kind: times_at(layers[kind], microbatch) for kind in set(kinds)}
            self._times[microbatch] = {
                name: np.array([getattr(known[kind], name) for kind in kinds]) for name in FIELDS
            }
            if self.profile.exchanging > 1:
                sizes = {layer.exchanged_bytes for layer in layers}
                least = {size: least_exchange_seconds(self.profile, size * microbatch) for size in sizes}
                waits = np.array([least[layer.exchanged_bytes] for layer in layers])
                ahead, back = self.profile.exchanges
                for name, often in (("forward", ahead), ("recompute", ahead), ("input_grad", back), ("joint", back)):
                    self._times[microbatch][name] += often * waits
        return self._times[microbatch]

    def seconds(self, cut: Cut, microbatch: int, split: bool, share: float, frozen: Sequence[int]) -> StageSeconds:
        """Return the seconds of stages for a full micro-batch.

        Args:
            cut: layers of each stage.
            microbatch: samples.
            split: whether backwards are split; otherwise B and W are the parts of a joint one.
            share: of a layer's time, with as many devices of a host at work as there will be.
            frozen: stages without a trained parameter.
        """
        p, starts, extra = self.profile, [layers[0] for layers in cut], self.profile.task_overhead_s
        times = {name: share * np.add.reduceat(each, starts) for name, each in self.times(microbatch).items()}
        inputs, weight = times["input_grad"] + extra, times["weight_grad"] + extra
        weight[list(frozen)] = 0.0
        if not split:
            both = inputs + weight
            scale = np.where(both > 0, (times["joint"] + extra) / np.maximum(both, 1e-300), 1.0)
            inputs, weight = inputs * scale, weight * scale
        inputs[: next((s for s in range(len(cut)) if s not in frozen), 0)] = 0.0
        sent = self._size("sent_bytes")[[layers[-1] for layers in cut]] * microbatch
        none = np.zeros(len(cut))
        return StageSeconds(
            forward=times["forward"] + extra,
            input_grad=inputs,
            weight_grad=weight,
            recompute=times["recompute"] + extra,
            links=np.minimum(*(link.alpha_s + link.beta_s_per_byte * sent for link in (p.inside, p.between))),
            update=none,
            all_reduce=none,
            gather=none,
            reduce_scatter=none,
            attention=none,
            attention_grad=none,
        )

    def bytes(self, cut: Cut, microbatch: int, split: bool, level: int, group: int) -> dict[str, Array]:
        """Return, per field of ``StageMemory`` that bounds read, its bytes by stage, for full micro-batches; of shards
        (``level``, over ``group`` copies), those always there."""
        p, starts, ends = self.profile, [layers[0] for layers in cut], [layers[-1] for layers in cut]
        each = parameter_bytes(p.dtype, self.train.optimizer, self.train.momentum)
        values, held = (np.add.reduceat(self._size(name), starts) for name in ("trained", "parameters"))
        if len(cut) == 1:
            values, held = values - p.trained_tied, held - p.tied_parameters
        reduced = values.copy()
        reduced[[0, -1][: len(cut)]] -= p.trained_tied
        output = self._size("output_bytes")[ends] * microbatch
        arriving = np.concatenate([[0.0], output[:-1]])
        fixed = 0.0 if split else np.add.reduceat(self._size("kept_fixed_bytes"), starts)
        kept = np.add.reduceat(self._size("kept_bytes"), starts) + self._size("unread_input_bytes")[starts]
        # Of experts that copies divide, each has its share already; those with the same one may divide it again.
        experts = np.add.reduceat(self._size("expert_parameters"), starts) * (p.experts > 1)
        again = copies_of_experts(group, p.experts)
        dense = values if again > 1 else values - experts
        optimizer, gradients, weights = (
            (values - experts) / group + experts / again if level >= least else values for least in (1, 2, 3)
        )
        narrow = np.add.reduceat(self._narrow, starts) if level == 3 else np.zeros(len(cut))
        return {
            "weights": weights * each.weight,
            "gathered": dense * each.weight * (level == 3) - narrow,
            "frozen": (held - values) * each.weight,
            "gradients": gradients * each.gradient,
            "summing": dense * each.gradient * (level >= 2),
            "graded": (values - dense * (level >= 2)) * each.gradient,  # from the first backward to the update
            "optimizer": optimizer * (each.optimizer + each.master),
            # 16-bit copies of weights that are gathered go with these.
            "casts": np.add.reduceat(self._size("cast_bytes"), starts) - narrow,
            "reduced": reduced * each.gradient,
            "kept": kept * microbatch + output + fixed,
            "kept_for_w": np.add.reduceat(self._size("waiting"), starts) * microbatch,
            "input": arriving,
            "messages": arriving + output,
            "sent": self._size("sent_bytes")[ends] * microbatch,
            "workspace": self._workspace[split][0][ends] * microbatch + self._workspace[split][1][ends],
        }

    def kept(self, microbatch: int, split: bool) -> Array:
        """Per layer, the bytes of activations that it keeps of a micro-batch."""
        return np.array([kept_bytes(layer, microbatch, split) for layer in self.profile.layers])

    @cached_property
    def _workspace(self) -> tuple[Array, Array]:
        """Per layer, the two figures of ``last_workspace``, for backwards that are not split and for those that are."""
        joint, split = (np.array([last_workspace(one, way) for one in self.profile.layers]).T for way in (False, True))
        return joint, split

    @cached_property
    def _narrow(self) -> Array:
        """Per layer, the bytes of ``narrow_bytes``."""
        return np.array([narrow_bytes(self.profile, (i,)) for i in range(len(self.profile.layers))])

    def _size(self, name: str) -> Array:
        """Per layer, a field of its profile."""
        if name not in self._sizes:
            self._sizes[name] = np.array([float(getattr(layer, name)) for layer in self.profile.layers])
        return self._sizes[name]


Times = NDArray[np.float64]


class Collectives(NamedTuple):
    """How many gathers and reduce-scatters of each stage replica a step has at least."""

    gathers: int
    scatters: int


NO_COLLECTIVES = Collectives(0, 0)


def least_collectives(c: Candidate) -> Collectives:
    """Count those of a candidate with shards.

    With ``gather: unit`` the windows of units that touch are one, and so may the reduce-scatters be; in an order of
    its own they are where it has them.
    """
    often = c.microbatches // c.form.replicas if c.gather == "microbatch" else 1
    return Collectives(often if c.level == 3 else 1, 1)


def least_step_seconds(
    form: Form,
    microbatches: int,
    costs: CostTable | StageSeconds,
    overheads: StepOverheads,
    recompute: frozenset[int] = frozenset(),
    collectives: Collectives = NO_COLLECTIVES,
    frozen: tuple[int, ...] = (),
) -> float:
    """No step of this form takes less.

    Per device: the time until its first task can start (the shortest way through the stages before), its work, and
    the time that its last task leaves for others (joint backwards only: the gradient's way back to stage 0; a weight
    gradient may be the last task of all). Then the least that gradient sums and updates add; a device's sums run one
    after another, none before all holders of its stage have done their share of the micro-batches. Steps without a
    barrier run into each other; what is left is a device's work, that of its network, and the way of a stage-0
    replica's last micro-batch there and back, after which alone its weights are new.

    Args:
        form: placement and kinds of task.
        microbatches: of one data-parallel copy.
        costs: of each stage.
        around: copies, and the norm; what may wait or not (``auto``) is taken not to.
        recompute: stages that recompute, besides the form's own.
        collectives: of each stage replica with shards; a device's run one after another.
        frozen: stages without a trained parameter; no gradient is sent to those before the first one with any.
    """
    place = np.array(form.placement)
    replicas = len(place)
    devices = int(place.max()) + 1
    each = microbatches // replicas  # as even as possible, so no replica has less
    tasks = _tasks(form, costs, recompute, frozen)
    forward, back, weight, recomputed, first, _ = tasks
    work = forward + back + weight + recomputed
    _, returning, there, home = _ways(form, costs, tasks)

    busy = _sums(place, each * work, devices)
    update = _sums(place, np.array(costs.update), devices)
    average = microbatches * float(work.sum()) / devices
    if form.versions != "flush":
        return max(float((busy + update).max()), average)
    summed, lane, ready = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    sharding = collectives.gathers * np.array(costs.gather) + collectives.scatters * np.array(costs.reduce_scatter)
    network = _sums(place, sharding, devices)
    if replicas * overheads.copies > 1:
        all_reduces = np.broadcast_to(np.array(costs.all_reduce), place.shape)
        summed, lane = _least(place, all_reduces, devices), _sums(place, all_reduces, devices)
        ready = _least(place, np.broadcast_to((there + each * work).max(axis=0), place.shape), devices)
    if overheads.norm == "wait":
        begin = _least(place, there, devices)
        end = _least(place, home, devices) if form.joint else np.zeros(devices)
        one = there[:, -1] + forward[-1] + returning[-1] + home[:, -1]
        after = float((begin + busy + np.maximum(end, summed)).max())
        done = max(after, average, float(one.min()), float((ready + lane).max()), float((network + lane).max()))
        return done + overheads.norm_s + float(update.max())
    # The first stage of each replica that trains: its next forward waits for its own last backward, its sum and its
    # update. Of fewer micro-batches than replicas, some replica has one.
    stage = max(each, 1) * (forward + (back + weight if form.joint else back) + recomputed)
    trips = (there - there[:, first : first + 1] + stage + home)[:, first:].max(axis=1)
    round_trip = float(trips.max() if each else trips.min())
    if replicas * overheads.copies > 1:
        round_trip += costs.all_reduce[first]
    return max(float((busy + update).max()), average, float((network + lane).max()), round_trip + costs.update[first])


def busiest_seconds(form: Form, costs: CostTable | StageSeconds, frozen: tuple[int, ...] = ()) -> float:
    """Seconds that some device computes for each micro-batch: in the long run, no step grows by less.

    Args:
        form: placement and kinds of task.
        costs: of each stage.
        frozen: stages without a trained parameter.
    """
    place = np.array(form.placement)
    tasks = _tasks(form, costs, frozenset(), frozen)
    work = tasks.forward + tasks.back + tasks.weight + tasks.recomputed
    return float(_sums(place, work / len(place), int(place.max()) + 1).max())


class Lives(NamedTuple):
    """Activations of a candidate, by stage: how long those of a micro-batch live, and how many bytes they are."""

    whole: Times
    """Bytes from a forward to its backward; 0 where they may be gone before."""
    again: Times
    """Bytes to recompute them from; no more than ``whole``."""
    saved: Times
    """Bytes kept for each second that is not recomputed, at least."""


def least_seconds_in_memory(
    form: Form,
    microbatches: int,
    costs: CostTable | StageSeconds,
    lives: Lives,
    room: Times,
    recomputing: bool,
    frozen: tuple[int, ...] = (),
) -> float:
    """No step of this form whose devices have so much room for activations takes less.

    The bytes alive on a device, summed over the step, are no more than its room times the step. Where a plan may
    recompute, each second that it does not is paid in bytes for as long as they live.

    Args:
        form: placement and kinds of task.
        microbatches: of one data-parallel copy.
        costs: of each stage.
        lives: bytes of activations.
        room: of each device, bytes for activations.
        recomputing: whether a plan may recompute besides the form's own.
        frozen: stages without a trained parameter.
    """
    if (room <= 0).any():
        return float("inf")
    place, size = np.array(form.placement), float(form.size)
    devices, each = int(place.max()) + 1, microbatches // len(place)
    tasks = _tasks(form, costs, frozenset(), frozen)
    leading, returning, there, home = _ways(form, costs, tasks)
    # From a stage's forward through all later ones and back, and its own backward, at whose start all is still there.
    down = (there + leading)[:, -1:] - there - leading
    up = (home + returning)[:, -1:] - home - returning
    waits = np.minimum(leading, size * tasks.forward) + down + up
    ends = returning if form.joint else np.minimum(returning, size * tasks.weight)
    again = np.isin(np.arange(form.stages), list(form.recomputes))
    least = np.where(again | recomputing, lives.again, lives.whole)
    held = _sums(place, each * (waits * least + ends * lives.whole), devices)
    step = float((held / room).max())
    if not recomputing:
        return step
    seconds = np.where(again, 0.0, each * np.array(costs.recompute))
    seconds[lives.whole <= 0] = 0.0
    busy = each * (tasks.forward + tasks.back + tasks.weight + tasks.recomputed) + seconds
    # Seconds saved for each byte and second, at most, by what lives shortest or saves most.
    price = np.where(seconds > 0, waits * lives.saved, np.inf)
    rate = np.full(devices, 0.0)
    with np.errstate(divide="ignore"):
        np.maximum.at(rate, place, 1 / np.maximum(price, 1e-300))
    work = _sums(place, busy, devices)
    with np.errstate(over="ignore", invalid="ignore"):  # where a rate is beyond all numbers, held / room remains: step
        return float(np.fmax.reduce((work + rate * held) / (1 + rate * room), initial=step))


class _Tasks(NamedTuple):
    """Seconds of each stage's tasks for one micro-batch; those that it does not have take none."""

    forward: Times
    back: Times
    weight: Times
    recomputed: Times
    first: int
    """The first stage that has a backward."""
    sent: NDArray[np.bool_]
    """Whether each stage but the first sends a gradient on."""


def _tasks(form: Form, costs: CostTable | StageSeconds, recompute: frozenset[int], frozen: tuple[int, ...]) -> _Tasks:
    stages = len(form.placement[0])
    forward, back, weight = (np.array(costs.by_kind(k)) for k in ("F", "B", "W"))
    needs = backwards(StageGraph.chain(stages), Rules(skip_first_b=form.skips_first_b, frozen=frozen))
    back[[not one.input_grad for one in needs]] = 0.0
    weight[[not one.weight_grad for one in needs]] = 0.0
    recomputed = np.zeros(stages)
    for s in recompute | form.recomputes:
        recomputed[s] = costs.recompute[s] if needs[s].exists else 0.0
    first = next(s for s, one in enumerate(needs) if one.exists)
    return _Tasks(forward, back, weight, recomputed, first, np.array([bool(one.sends_to) for one in needs[1:]]))


def _ways(form: Form, costs: CostTable | StageSeconds, tasks: _Tasks) -> tuple[Times, Times, Times, Times]:
    """By stage, seconds until the next one can start, there and back; by replica and stage, the way to it from stage 0,
    and from it back to there."""
    place, size = np.array(form.placement), float(form.size)
    leading, returning = tasks.forward, size * (tasks.back + tasks.weight if form.joint else tasks.back)
    if form.slices > 1:  # the first slice goes ahead, and comes back last: its attention is the shortest
        shorter = size * (1 - 1 / form.slices)
        leading = size * leading - shorter * np.array(costs.attention)
        returning = np.maximum(0.0, returning - shorter * np.array(costs.attention_grad))
    hops = np.where(place[:, 1:] != place[:, :-1], np.array(costs.links[:-1]), 0.0)
    there, home = np.zeros(place.shape), np.zeros(place.shape)
    there[:, 1:] = np.cumsum(leading[:-1] + hops, axis=1)
    home[:, 1:] = np.cumsum(np.where(tasks.sent, returning[:-1] + hops, 0.0), axis=1)
    return leading, returning, there, home


def _sums(place: NDArray[np.int64], values: Times, devices: int) -> Times:
    result: Times = np.bincount(place.ravel(), np.broadcast_to(values, place.shape).ravel(), devices).astype(float)
    return result


def _least(place: NDArray[np.int64], values: Times, devices: int) -> Times:
    result = np.full(devices, np.inf)
    np.minimum.at(result, place, values)
    return result
