"""The loops of the walk over arrangements, as machine code: the least step of one, and moves from one to the next.

An arrangement is two arrays with room for the deepest cut, ``starts`` and ``row`` (see ``arrangement.Arrangement``),
and the number of its stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.machine_code import compiled
from raypipe.search.list_kernel import Floats, Ints
from raypipe.search.order_kernel import Seed, accepted, below, drawn

SMOOTH = 80.0
"""Power of the mean over devices' least steps: the slowest counts most, and the others a little."""
FAR = 5
"""Most borders in a row that move at once."""


class Numbers(NamedTuple):
    """A certificate's instance (``plan.certificate.instance``). Values of layers are sums over all before each."""

    forward: Floats
    """Per kind of device and layer, as the two below; (kinds, L + 1)."""
    input_grad: Floats
    weight_grad: Floats
    kept: Floats
    """(L + 1,), as ``state``."""
    state: Floats
    kind_of: Ints
    """Per device, as ``room``."""
    room: Floats
    layers: int
    microbatches: int
    message: float
    barrier: bool
    limited: bool


@compiled
def smooth(times: Floats, power: float) -> float:
    """A mean of devices' times that is close to the largest, and falls with the others, too."""
    most = times.max()
    if most == np.inf or most <= 0.0:
        return float(most)
    mean = 0.0
    for x in times:
        mean += (x / most) ** power
    return float(most * (mean / len(times)) ** (1.0 / power))


@compiled
def _supply(n: int, task: float, t: float, longest: float) -> float:
    """Seconds of a stage's tasks that may have run in the time since the first of them could begin."""
    return min(n * task, task * (1.0 + t / longest)) if longest > 0.0 else n * task


@compiled
def _within(room: float, ratio: float) -> float:
    """Seconds of tasks that fit into so many bytes, at so many seconds a byte."""
    if room == np.inf or ratio == np.inf:
        return np.inf if ratio > 0.0 else 0.0
    return room * ratio


@compiled
def least_steps(i: Numbers, starts: Ints, row: Ints, count: int) -> Floats:
    """The bound of each device, see ``annealing.LeastStep``; infinite where weights or one micro-batch do not fit."""
    n, devices = i.microbatches, len(i.room)
    forward, back, weight, kept = np.empty(count), np.empty(count), np.empty(count), np.empty(count)
    # The longest task of a micro-batch on its way to each stage's F, and to its B. Without a barrier the devices before
    # it may have begun long before, so that only the stage's own count.
    there, round_trip = np.empty(count), np.empty(count)
    start, returns = np.empty(count), np.empty(count)
    state, early, result = np.zeros(devices), 0.0, np.zeros(devices)
    longest = at = 0.0
    for s in range(count):
        d, x = row[s], starts[s]
        y = starts[s + 1] if s + 1 < count else i.layers
        kind = i.kind_of[d]
        forward[s] = i.forward[kind, y] - i.forward[kind, x]
        back[s] = i.input_grad[kind, y] - i.input_grad[kind, x]
        weight[s] = i.weight_grad[kind, y] - i.weight_grad[kind, x]
        kept[s] = i.kept[y] - i.kept[x]
        state[d] += i.state[y] - i.state[x]
        if s and row[s - 1] != d:
            at += i.message
        start[s] = at
        at += forward[s]
        longest = max(longest, forward[s])
        there[s] = longest if i.barrier else forward[s]
    for s in range(count - 1, -1, -1):
        if s + 1 < count and row[s + 1] != row[s]:
            at += i.message
        returns[s] = at
        longest = max(longest, back[s])
        round_trip[s] = longest if i.barrier else back[s]
        at += back[s]
    whole = at + weight[0]
    own = np.empty(count, np.int64)
    for d in range(devices):
        held = 0
        work = one = all_weight = area = slowest_weight = 0.0
        for s in range(count):
            if row[s] == d:
                own[held] = s
                held += 1
                work += forward[s] + back[s] + weight[s]
                one += kept[s]
                all_weight += weight[s]
                area += kept[s] * (returns[s] + back[s] - start[s] + weight[s])
                slowest_weight = max(slowest_weight, weight[s] / kept[s] if kept[s] > 0.0 else np.inf)
        if not held:
            continue
        room = i.room[d] - state[d]
        if i.limited and room < one:
            result[:] = np.inf
            return result
        work *= n
        first, last = own[0], own[held - 1]
        begin = start[first] if i.barrier else 0.0
        shift = begin - start[first]
        least = begin + work
        ratio = fits = 0.0
        for k in range(held):
            # Until the next stage's first F, or the first backward, forwards up to stage s run alone.
            s = own[k]
            t = start[own[k + 1]] if k + 1 < held else returns[last]
            early = 0.0
            for j in range(k + 1):
                e = own[j]
                early += _supply(n, forward[e], t - start[e], there[e])
            ratio = max(ratio, forward[s] / kept[s] if kept[s] > 0.0 else np.inf)
            fits = min(early, _within(room, ratio)) if i.limited else early
            least = max(least, shift + t + work - fits)
        for k in range(held - 1):
            # Until stage s's first backward, forwards and later stages' backwards run alone.
            t = returns[own[k]]
            early = 0.0
            for j in range(held):
                e = own[j]
                early += _supply(n, forward[e], t - start[e], there[e])
                if j > k:
                    early += _supply(n, back[e] + weight[e], t - returns[e], round_trip[e])
            least = max(least, shift + t + work - early)
        if i.barrier:
            late = n * all_weight
            if i.limited:
                late = min(late, _within(room, slowest_weight))
            out = whole - returns[first] - back[first] if first else 0.0
            least = max(least, begin + work - late + out)
            least = max(least, returns[last] + work - fits - late + out)
        if i.limited and room > 0.0:
            least = max(least, n * area / room)
        result[d] = least
    return result


@compiled
def _copy(starts: Ints, row: Ints, to_starts: Ints, to_row: Ints, count: int) -> None:
    """Copy an arrangement; slices of arrays would bring the making of Numba's error messages, a second to compile."""
    for s in range(count):
        to_starts[s], to_row[s] = starts[s], row[s]


@compiled
def _any_stage(row: Ints, count: int, device: int, seed: Seed) -> int:
    """Any stage, or one of a device that has one."""
    if device < 0:
        return below(seed, count)
    held = 0
    for s in range(count):
        held += row[s] == device
    k = below(seed, held)
    for s in range(count):
        if row[s] == device:
            if not k:
                return s
            k -= 1
    return 0


@compiled
def _serves_all(row: Ints, count: int, devices: int) -> bool:
    """Return whether every device has a stage."""
    seen = np.zeros(devices, np.bool_)
    for s in range(count):
        seen[row[s]] = True
    return bool(seen.all())


@compiled
def _move_borders(starts: Ints, row: Ints, count: int, layers: int, device: int, seed: Seed) -> bool:
    """Move a border of a stage by one layer, or several borders in a row."""
    if count < 2:
        return False
    s = min(count - 1, max(1, _any_stage(row, count, device, seed) + below(seed, 2)))
    draw = below(seed, 6)
    until = min(count, s + (1 if draw < 3 else 2 if draw == 3 else 3 if draw == 4 else FAR))
    by = 1 if below(seed, 2) else -1
    follows = starts[until] if until < count else layers
    if starts[s] + by <= starts[s - 1] or starts[until - 1] + by >= follows:
        return False
    for k in range(s, until):
        starts[k] += by
    return True


@compiled
def move(
    starts: Ints,
    row: Ints,
    ahead: Floats,
    count: int,
    layers: int,
    devices: int,
    most_stages: int,
    borders: float,
    device: int,
    seed: Seed,
) -> int:
    """Change an arrangement in place, so that no device is left without a layer.

    A border moves, or several in a row do; a stage changes its device, or two swap theirs; a stage is divided, and one
    part of it goes elsewhere; a stage joins the one before or behind it.

    Args:
        starts, row, count: the arrangement.
        ahead: what else is known of each stage; both parts of one keep it.
        layers: of the model.
        devices: D.
        most_stages: deepest cut.
        borders: share of the moves that move borders.
        device: whose stages move; -1 for any.
        seed: of the random numbers.

    Returns:
        The number of its stages; 0 where what was drawn is no move, and the arrays are then worth nothing.
    """
    if drawn(seed) < borders:
        return count if _move_borders(starts, row, count, layers, device, seed) else 0
    s, draw = _any_stage(row, count, device, seed), drawn(seed)
    if draw < 0.3:
        t = below(seed, count)
        if row[s] == row[t]:
            return 0
        row[s], row[t] = row[t], row[s]
        return count
    if draw < 0.6:
        d = below(seed, devices)
        if d == row[s]:
            return 0
        row[s] = d
        return count if _serves_all(row, count, devices) else 0
    if draw < 0.8:
        size = (starts[s + 1] if s + 1 < count else layers) - starts[s]
        if count >= most_stages or size < 2:
            return 0
        at, d = starts[s] + 1 + below(seed, size - 1), below(seed, devices)
        for k in range(count, s + 1, -1):
            starts[k], row[k], ahead[k] = starts[k - 1], row[k - 1], ahead[k - 1]
        starts[s + 1], row[s + 1], ahead[s + 1] = at, row[s], ahead[s]
        row[s if below(seed, 2) else s + 1] = d
        return count + 1
    if not s:
        return 0
    gone = s - below(seed, 2)
    for k in range(s, count - 1):
        starts[k] = starts[k + 1]
    for k in range(gone, count - 1):
        row[k], ahead[k] = row[k + 1], ahead[k + 1]
    return count - 1 if _serves_all(row, count - 1, devices) else 0


@compiled
def promising(
    i: Numbers,
    starts: Ints,
    row: Ints,
    ahead: Floats,
    count: int,
    most_stages: int,
    borders: float,
    slowest: int,
    often: float,
    mean: float,
    heat: float,
    tries: int,
    to_starts: Ints,
    to_row: Ints,
    to_ahead: Floats,
    seed: Seed,
) -> tuple[int, float]:
    """Draw moves until the least step of one is below what an annealing walk would accept.

    Args:
        i: of the model.
        starts, row, count: the arrangement to move from.
        ahead: how many forwards each of its stages may run ahead.
        most_stages: deepest cut.
        borders: share of the moves that move borders.
        slowest: the device that is last.
        often: share of the moves that are of a stage of that one.
        mean: of the arrangement to move from.
        heat: temperature, as a share of it.
        tries: moves that are drawn at most.
        to_starts, to_row, to_ahead: where the arrangement is written.
        seed: of the random numbers.

    Returns:
        The number of its stages, 0 if there was none; and the mean below which it is to be accepted.
    """
    devices = len(i.room)
    for _ in range(tries):
        limit = accepted(mean, heat, seed)
        _copy(starts, row, to_starts, to_row, count)
        for s in range(count):
            to_ahead[s] = ahead[s]
        device = slowest if drawn(seed) < often else -1
        result = move(to_starts, to_row, to_ahead, count, i.layers, devices, most_stages, borders, device, seed)
        if result and least_steps(i, to_starts, to_row, result).max() < limit:
            return result, limit
    return 0, 0.0


@compiled
def nudged(ahead: Floats, count: int, most: int, often: float, seed: Seed) -> Floats:
    """How many forwards stages may run ahead, some of them one more or one less."""
    result = ahead[:count].copy()
    for s in range(count):
        if drawn(seed) < often:
            result[s] = min(float(most), max(1.0, result[s] + (1.0 if below(seed, 2) else -1.0)))
    return result


@compiled
def anneal(
    i: Numbers,
    starts: Ints,
    row: Ints,
    count: int,
    most_stages: int,
    borders: float,
    warm: float,
    cold: float,
    tries: int,
    seed: Seed,
) -> int:
    """Walk by least steps alone from an arrangement, and put the best one of the walk in its place.

    Args:
        i: of the model.
        starts, row, count: where to begin; ``most_stages`` long.
        most_stages: deepest cut.
        borders: share of the moves that move borders.
        warm, cold: first and last temperature, as shares of the step.
        tries: moves that are drawn.
        seed: of the random numbers.

    Returns:
        The number of the best one's stages.
    """
    devices = len(i.room)
    value = smooth(least_steps(i, starts, row, count), SMOOTH)
    best, best_count = value, count
    here_starts, here_row, here_count = starts.copy(), row.copy(), count
    to_starts, to_row, nothing = starts.copy(), row.copy(), np.zeros(len(row))
    for k in range(tries):
        _copy(here_starts, here_row, to_starts, to_row, here_count)
        result = move(to_starts, to_row, nothing, here_count, i.layers, devices, most_stages, borders, -1, seed)
        if not result:
            continue
        new = smooth(least_steps(i, to_starts, to_row, result), SMOOTH)
        heat = warm * (cold / warm) ** (k / tries)
        if new < accepted(value, heat, seed):
            value, here_count = new, result
            _copy(to_starts, to_row, here_starts, here_row, result)
            if new < best:
                best, best_count = new, result
                _copy(to_starts, to_row, starts, row, result)
    return best_count


class Tables(NamedTuple):
    """Times of stages of layers x to y - 1, for any two; not a number where it is not known yet."""

    seconds: Floats
    """Of F, B and W on each kind of device; (L, L + 1, kinds, 3)."""
    frozen: NDArray[np.bool_]
    """Whether nothing is trained; (L, L + 1)."""
    memory: Floats
    """Bytes: of activations up to the B and up to the W, kept from step to step, needed for a moment, read; (L, L + 1,
    5)."""
    uses: NDArray[np.bool_]
    """Which kinds of device a device is one of, in some copy; (D, kinds)."""
    message: Floats
    """Seconds of a message behind a layer from one device to another; (D, D, L)."""
    room: Floats
    """Bytes per device."""


@compiled
def unknown(of: Tables, starts: Ints, row: Ints, count: int) -> Ints:
    """The stages whose layers the tables do not know yet."""
    result, n = np.empty(count, np.int64), 0
    for s in range(count):
        y = starts[s + 1] if s + 1 < count else of.message.shape[2]
        if np.isnan(of.seconds[starts[s], y, 0, 0]):
            result[n] = s
            n += 1
    return result[:n]


@compiled
def stages(
    of: Tables, starts: Ints, row: Ints, count: int, microbatches: int
) -> tuple[bool, Floats, Floats, Floats, Floats, Ints]:
    """Return what a search for the order needs of an arrangement.

    Returns:
        Whether its weights and one micro-batch fit; seconds of F, B and W of each stage; what activations take up to
        the B and up to the W, in units of their device's mean; seconds of a message to the next stage; the limit of
        each device in its unit, infinite where all micro-batches fit; and the frozen stages.
    """
    layers, devices, kinds = of.message.shape[2], len(of.room), of.uses.shape[1]
    times, sizes, lag = np.zeros((count, 3)), np.zeros((count, 2)), np.zeros(count)
    frozen, many = np.empty(count, np.int64), 0
    whole, held, state = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    moment, reads = np.zeros(devices), np.zeros(devices)
    for s in range(count):
        d, x = row[s], starts[s]
        y = starts[s + 1] if s + 1 < count else layers
        for kind in range(kinds):
            if of.uses[d, kind]:
                for task in range(3):
                    times[s, task] = max(times[s, task], of.seconds[x, y, kind, task])
        if of.frozen[x, y]:
            frozen[many] = s
            many += 1
        if s + 1 < count:
            lag[s] = of.message[d, row[s + 1], y - 1]
        memory = of.memory[x, y]
        sizes[s, 0], sizes[s, 1] = max(memory[0], memory[1]), memory[1]
        whole[d] += sizes[s, 0]
        held[d] += 1
        state[d] += memory[2]
        moment[d] = max(moment[d], memory[3])
        reads[d] = max(reads[d], memory[4])
    if many == count:
        many = 0
    for k in range(many):  # no gradient goes back further than the first stage that is trained
        times[frozen[k], 2] = 0.0
        if frozen[k] == k:
            times[k, 1] = 0.0
    cap = np.full(devices, np.inf)
    for d in range(devices):
        room = of.room[d] - state[d] - moment[d] - reads[d]
        if room < whole[d]:
            return False, times, sizes, lag, cap, frozen[:many]
        unit = whole[d] / held[d] if whole[d] > 0.0 else 1.0
        whole[d] = unit  # from here on
        if room < unit * held[d] * microbatches:
            cap[d] = room / unit
    for s in range(count):
        sizes[s] /= whole[row[s]]
    return True, times, sizes, lag, cap, frozen[:many]


@compiled
def shortest(each: Floats, power: float) -> tuple[int, float, float, int]:
    """Of several orders, given when devices end in each, the one with the smallest ``smooth``.

    Returns:
        Its number, that mean, its longest device's time, and this device.
    """
    best, mean = 0, np.inf
    for k in range(len(each)):
        new = smooth(each[k], power)
        if new < mean:
            best, mean = k, new
    return best, mean, float(each[best].max()), int(each[best].argmax())
