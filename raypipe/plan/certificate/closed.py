"""Lower bounds on a step in closed form: each holds for any cut, placement and order. Milliseconds to compute.

Throughout: D devices, U <= D of which hold a layer; N micro-batches; every layer is on one device of a copy. A stage is
a run of layers, and what it takes is the sum over its layers, plus an overhead per task; so whatever the cut, a device
works on each micro-batch for as long as its layers take, and for at least two overheads (one where it may hold nothing
but frozen layers that need no backward: ``Instance.tasks``).

**While a pipeline fills** devices stand idle. Every layer's forwards run on one device, one micro-batch at a time. So
at least m micro-batches have gone through the layers 0 to s when the (m + 1)-th leaves layer s, and all of them through
the longest of these, of f seconds: it leaves no sooner than (forwards of the layers 0 to s) + m f. (Of m + 1
micro-batches that have left layer s, one was the last to leave the longest layer, which took m + 1 times f from when
the first could be there; the rest of its way was still before it.) Whatever devices do by a moment u at which the first
micro-batch has not gone through all layers is such forwards, and the order of micro-batches may differ from layer to
layer. U devices could have worked for U u seconds. What they cannot have done of that, they are idle, or recompute.

One slow layer near the front thus costs more than the sum of the forwards before each device, which
``start`` counts.

**Layers are whole**: devices cannot share them evenly. No device's work is more than the largest sum of whole layers
that fits into a step, beside the time before it can begin; these together must hold all layers. The device with the
longest layer l, most often a head of a large vocabulary, has less room: as ``assigned`` proves, l and the backwards of
whatever else that device has all come after the forwards of the layers before l. Sums of layers are found as bits of
one long integer (subset sums).

With 26 equal blocks and a head of six and a half on four devices: either three devices share 24 of them, eight each,
and two are with the head, or one has nine. Evenly shared it would be 8.1 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.certificate.instance import Instance

MOMENTS = 128
"""At which the idle time is counted; it is a bound at each of them."""


def idle_while_filling(forward: Sequence[float], microbatches: int, most: int) -> list[float]:
    """Return seconds that 1, 2, ... devices are idle, all together, before the first micro-batch has passed all layers.

    Args:
        forward: per layer, seconds of one micro-batch's forward; not empty.
        microbatches: N.
        most: devices that hold a layer, at most.
    """
    own = np.array(forward)
    moments = np.linspace(0.0, own.sum(), MOMENTS)
    done = _forwards_done(own, microbatches, moments)
    return [float((used * moments - done).max()) for used in range(1, most + 1)]


def _forwards_done(own: NDArray[np.float64], microbatches: int, moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most seconds of forwards that all devices together can have done by each moment."""
    longest = np.maximum.accumulate(own)
    since = np.maximum(0.0, moments[:, None] - (np.cumsum(own) - own))
    # Micro-batches arrive no closer together than ``longest``, so that one at most is in the middle of a layer.
    apart = np.where(longest > 0, longest, 1.0)
    whole = np.clip(np.floor((since - own) / apart) + 1, 0, microbatches)
    part = np.where(whole < microbatches, np.clip(since - whole * longest, 0.0, own), 0.0)
    done: NDArray[np.float64] = (whole * own + part).sum(axis=1)
    return done


UNITS = 8192
"""Units of time in an evenly shared step; layers are rounded down to them."""
MOST = 1.5
"""Times the evenly shared step, up to which the bound is looked for."""
HALVINGS = 24
LARGE = 4_000
"""Layers times devices above which devices have so many layers each that whole ones matter little."""


def whole_layers(i: Instance, starts: Sequence[float], shared: float) -> float:
    """Return the bound, at least ``shared``; that itself where devices differ or the instance is large.

    Args:
        i: the instance.
        starts: per device, in the order of their first layers, the least time at which it begins.
        shared: a lower bound from all work shared evenly, overheads included.
    """
    if not i.alike or i.devices == 1 or i.layers * i.devices > LARGE or not i.layers or shared <= 0:
        return shared
    return _Packing(i, starts[: i.layers], shared).bound()


class _Packing:
    """The layers' work as whole units, and the sums of them."""

    def __init__(self, i: Instance, starts: Sequence[float], shared: float) -> None:
        n, least = i.microbatches, i.least
        self.i, self.starts, self.shared, self.unit = i, starts, shared, shared / UNITS
        barrier = i.barrier and i.flushes
        seconds = [n * w + (0.0 if barrier else u) for w, u in zip(least.work, least.update, strict=True)]
        self.sizes = [floor(x / self.unit) for x in seconds]
        self.top = max(range(i.layers), key=lambda s: seconds[s])
        rest = [s for s in range(i.layers) if s != self.top]
        self.sums = _sums([self.sizes[s] for s in rest])
        self.overhead = i.tasks * n * least.overhead
        self.late: float | None = None
        """Seconds before the longest layer's device may begin with that layer or a backward, and their part of it."""
        backward = [n * least.backward[s] for s in rest]
        if barrier and min(backward, default=0.0) > 0:
            self.late = i.ahead[self.top] + n * least.work[self.top] + (i.tasks - 1) * n * least.overhead
            self.backward_sums = _sums([floor(x / self.unit) for x in backward])
            self.most = max(seconds[s] / x for s, x in zip(rest, backward, strict=True))
            """Work per second of backward."""

    def bound(self) -> float:
        """Halve the interval between a step that is too short and one that may not be."""
        low, high = self.shared, MOST * self.shared
        if self.holds_all(low):
            return low
        if not self.holds_all(high):
            return high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.holds_all(middle) else (middle, high)
        return low

    def holds_all(self, step: float) -> bool:
        """Return whether all layers may fit into a step of this length, the longest on the best device for that."""
        rooms = [floor((step - start - self.overhead) / self.unit + 1e-6) for start in self.starts]
        each = [_largest(self.sums, room) for room in rooms]
        own, limit = self.sizes[self.top], self.beside(step)
        total, together = sum(self.sizes), sum(each)
        for room, without in zip(rooms, each, strict=True):
            left = min(room - own, limit)
            if left >= 0 and together - without + own + _largest(self.sums, left) >= total:
                return True
        return False

    def beside(self, step: float) -> int:
        """Units of other layers' work that the longest layer's device may have, as far as backwards limit it."""
        if self.late is None:
            return 2 * UNITS
        left = floor((step - self.late) / self.unit + 1e-6)
        if left < 0:
            return -1
        most = _largest(self.backward_sums, left) + self.i.layers  # each was rounded down by less than a unit
        return floor(self.most * most)


def _sums(sizes: Sequence[int]) -> int:
    """An integer whose bit k is set if some of these sizes add up to k, as far as any step needs."""
    mask = (1 << int(MOST * UNITS) + 2) - 1
    result = 1
    for size in sizes:
        result |= (result << size) & mask
    return result


def _largest(sums: int, room: int) -> int:
    """The largest sum that is no more than this."""
    return (sums & ((1 << room + 1) - 1)).bit_length() - 1 if room >= 0 else 0


def closed_bound(i: Instance) -> float:
    """Return the largest of the bounds of this module, in seconds of a step.

    What comes after the last task of a step that ends with a barrier (the norm, the longest update) adds to all of
    them: a step is over when its slowest update is, and some device updates at least a share 1/D of all weights.
    """
    shared = shared_work(i)
    starts = [start(i, rank) for rank in range(min(i.devices, i.layers))]
    result = max(whole_layers(i, starts, shared), largest_layers(i), one_microbatch(i))
    if i.flushes:
        result = max(result, memory_time(i))
    update = sum(i.least.update)
    sums = i.all_reduce_per_update * update / i.devices if i.flushes else 0.0
    if not (i.barrier and i.flushes):
        return max(result, updates(i), sums)
    return max(result, sums) + i.after + max(update / i.devices, max(i.least.update, default=0.0))


def spread_bound(i: Instance) -> float:
    """The bound for plans whose layers are on several devices of a copy (Chimera): what needs no layer to be on one.

    All work on all devices, one micro-batch there and back, and memory for at least one copy of the weights.
    """
    n, least = i.microbatches, i.least
    result = n * sum(least.work) / i.devices
    if i.flushes:
        result = max(result, i.ahead[-1] + i.behind[0], memory_time(i))
    return result + (i.after if i.barrier else 0.0)


def start(i: Instance, rank: int) -> float:
    """Least time at which the ``rank``-th device (from 0) of those that hold a layer can begin, by their first layers.

    Number the U devices by the first layer that each holds. These first layers differ, so that of device k is layer k
    or a later one; and the devices 0 to k - 1 hold at least one of the layers before it. The first task of device k
    comes after the forward, of some micro-batch, of all layers before its first one, and that micro-batch has been on
    the k other devices, so it has taken at least k messages. (Every first layer after the ones of devices 0..k-1 has to
    be reached from them; each of these devices is met on the way.)
    """
    return i.ahead[rank] + rank * i.message if i.barrier and i.flushes else 0.0


def shared_work(i: Instance) -> float:
    """All work on all devices: N times the work of all layers, and the time that devices cannot have begun.

    Summed over the U devices that hold a layer, step time is at least their starts plus their work, and at least what
    they are idle while the pipeline fills (``idle_while_filling``) plus their work. With devices of several kinds, q_d
    is the least ratio, over all layers, of device d's time to the fastest kind's: in time T it does at most T / q_d of
    what the fastest would; their starts are left out.
    """
    n, least = i.microbatches, i.least
    total = n * sum(least.work)
    if not i.alike:
        speed = 0.0
        for k in i.kind_of:
            pairs = zip(i.kinds[k].work, least.work, strict=True)
            ratio = min((own / best for own, best in pairs if best > 0), default=1.0)
            speed += 1.0 / max(1.0, ratio)
        return total / speed + i.tasks * n * least.overhead
    most = min(i.devices, i.layers)
    filling = idle_while_filling(least.forward, n, most) if i.barrier and i.flushes else [0.0] * most
    best, starts = float("inf"), 0.0
    for used, idle in enumerate(filling, 1):
        starts += start(i, used - 1)
        # Tasks' overheads may fall into the time while the pipeline fills, but not before a device's start.
        best = min(best, max((total + starts) / used + i.tasks * n * least.overhead, (total + idle) / used))
    return best


def largest_layers(i: Instance) -> float:
    """Some device has k + 1 of the k * D + 1 layers with most work, for every k (pigeonhole): k = 0 is the largest.

    For k = 0 also when that device begins: either the largest layer l is its first one, so that all before l ran
    elsewhere, or its first one is some a < l, whose work it has as well. No task of l begins before all forwards that
    lead to it, wherever these are.
    """
    n, work = i.microbatches, i.least.work
    ranked = sorted(work, reverse=True)
    best = 0.0
    for k in range(i.layers):
        if k * i.devices >= i.layers:
            break
        top = ranked[: k * i.devices + 1]
        best = max(best, n * sum(top[-(k + 1) :]))
    for layer, own in enumerate(work):
        ways = [n * (own + (work[a] if a < layer else 0.0)) + _reached(i, a) for a in range(layer + 1)]
        best = max(best, min(ways), _late(i, layer))
    return best + i.tasks * n * i.least.overhead


def _late(i: Instance, layer: int) -> float:
    """One layer's own work after the forwards of all before it, and a message, or also the layer before's backwards."""
    if not (i.barrier and i.flushes):
        return 0.0
    n, least = i.microbatches, i.least
    own = i.ahead[layer] + n * (least.work[layer] - least.overhead)  # its F may be part of a task that began before
    return own + min(i.message, n * least.backward[layer - 1]) if layer else own


def _reached(i: Instance, first: int) -> float:
    """Least time until a device whose first layer is this one can begin."""
    if not (i.barrier and i.flushes) or first == 0:
        return 0.0
    return i.ahead[first] + i.message


def one_microbatch(i: Instance) -> float:
    """One micro-batch goes through all layers and back; on U devices that takes 2 (U - 1) messages at least.

    With frozen layers before the first trained one, all others may be on one device, and no message leads back.
    More devices share the work better and send more messages, fewer the other way round: the best number counts.
    """
    there = i.ahead[-1] + i.behind[0]
    if not i.flushes:
        return 0.0
    each = i.microbatches * sum(i.least.work)
    used = range(1, min(i.devices, i.layers) + 1)
    ways = 1 if i.frozen_first else 2
    return min(max(there + ways * (u - 1) * i.message, each / u if i.alike else 0.0) for u in used)


def memory_time(i: Instance) -> float:
    """Activations occupy the devices' memory beside weights and optimizer state: see ``MemoryTime``.

    A micro-batch keeps a layer's activations at least from its F through the layers behind and back (``life``), and
    from its B to the end of its W what W needs.
    """
    room = sum(i.room) - sum(i.state)
    least = i.least
    if room == float("inf"):
        return 0.0
    if room <= 0:
        return float("inf") if sum(i.state) > sum(i.room) * (1 + 1e-9) else 0.0
    weight = np.maximum(0.0, np.array(least.backward) - np.array(least.input_grad))
    held = np.array([kept * i.life(s) for s, kept in enumerate(i.kept)])
    for_w = float(np.minimum(i.waiting, i.kept) @ weight)
    return MemoryTime(held, np.array(least.recompute), sum(least.work), for_w).least(i.microbatches, i.devices, room)


class MemoryTime:
    """Activations occupy memory: bytes times seconds of all micro-batches fit into those of all devices in a step.

    Recomputation frees a layer's activations for its forward's time once more; the bound lets every layer and
    micro-batch choose, in any share, whatever is best (a linear program of two constraints, solved by taking layers in
    the order of memory-time per second of recomputation).

    Args:
        held: of each layer, bytes of a micro-batch times the seconds that they are kept.
        again: seconds of recomputing each layer; infinite where no plan may.
        work: seconds of all that a micro-batch takes without recomputation.
        always: byte-seconds of a micro-batch that recomputation does not free.
    """

    def __init__(self, held: NDArray[np.float64], again: NDArray[np.float64], work: float, always: float = 0.0) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            order = np.argsort(np.where(held > 0, held / again, 0.0), kind="stable")
        self.held = always + np.concatenate([[0.0], np.cumsum(held[order])])
        """Byte-seconds of a micro-batch, by how many layers are kept."""
        self.work = work + np.concatenate([np.cumsum(again[order][::-1])[::-1], [0.0]])
        """Seconds of a micro-batch, by how many layers are kept."""

    def least(self, microbatches: int, devices: int, room: float) -> float:
        """Return the bound on the step of so many devices with ``room`` bytes for activations in all."""
        if room <= 0:
            return float("inf")
        work, held = microbatches * self.work / devices, microbatches * self.held / room
        full = held >= work
        if not full.any():
            return float(work[-1])
        k = int(full.argmax())
        if not k or work[k - 1] == np.inf:
            return float(held[k])
        # Between two numbers of layers, some micro-batches keep the layer and the others do not.
        before, behind = work[k - 1] - held[k - 1], held[k] - work[k]
        share = before / (before + behind)
        return float(work[k - 1] + share * (work[k] - work[k - 1]))


def updates(i: Instance) -> float:
    """Without a barrier a device updates its layers' weights between its steps: work and updates, shared evenly."""
    n, least = i.microbatches, i.least
    if not i.alike:
        return 0.0
    return (n * sum(least.work) + sum(least.update)) / i.devices + i.tasks * n * least.overhead
