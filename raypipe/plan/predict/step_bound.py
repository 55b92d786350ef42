"""Least time that a candidate's step can take, from a few array operations: what lets a search skip most candidates.

Never above the true value, for any order of the same tasks on the same placement; a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.step_time import StepOverheads
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, StageGraph, backwards

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
    costs: CostTable,
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
    replicas, stages = place.shape
    devices = int(place.max()) + 1
    each = microbatches // replicas  # as even as possible, so no replica has less
    forward, back, weight, recomputed, first, sent = _tasks(form, costs, recompute, frozen)
    work = forward + back + weight + recomputed
    returning = float(form.size) * (back + weight if form.joint else back)
    leading = forward
    if form.slices > 1:  # the first slice goes ahead, and comes back last: its attention is the shortest
        shorter = 1 - 1 / form.slices
        leading = float(form.size) * (forward - shorter * np.array(costs.attention))
        returning = np.maximum(0.0, returning - float(form.size) * shorter * np.array(costs.attention_grad))

    hops = np.where(place[:, 1:] != place[:, :-1], np.array(costs.links[:-1]), 0.0)
    there = np.zeros((replicas, stages))
    there[:, 1:] = np.cumsum(leading[:-1] + hops, axis=1)
    home = np.zeros((replicas, stages))
    home[:, 1:] = np.cumsum(np.where(sent, returning[:-1] + hops, 0.0), axis=1)

    busy = _sums(place, np.broadcast_to(each * work, place.shape), devices)
    update = _sums(place, np.broadcast_to(np.array(costs.update), place.shape), devices)
    average = microbatches * float(work.sum()) / devices
    if form.versions != "flush":
        return max(float((busy + update).max()), average)
    summed, lane, ready = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    sharding = collectives.gathers * np.array(costs.gather) + collectives.scatters * np.array(costs.reduce_scatter)
    network = _sums(place, np.broadcast_to(sharding, place.shape), devices)
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


def busiest_seconds(form: Form, costs: CostTable, frozen: tuple[int, ...] = ()) -> float:
    """Seconds that some device computes for each micro-batch: in the long run, no step grows by less.

    Args:
        form: placement and kinds of task.
        costs: of each stage.
        frozen: stages without a trained parameter.
    """
    place = np.array(form.placement)
    tasks = _tasks(form, costs, frozenset(), frozen)
    work = tasks.forward + tasks.back + tasks.weight + tasks.recomputed
    each = np.broadcast_to(work / len(place), place.shape)
    return float(_sums(place, each, int(place.max()) + 1).max())


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


def _tasks(form: Form, costs: CostTable, recompute: frozenset[int], frozen: tuple[int, ...]) -> _Tasks:
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


def _sums(place: NDArray[np.int64], values: Times, devices: int) -> Times:
    found = np.zeros(devices)
    np.add.at(found, place, values)
    return found


def _least(place: NDArray[np.int64], values: Times, devices: int) -> Times:
    found = np.full(devices, np.inf)
    np.minimum.at(found, place, values)
    return found
