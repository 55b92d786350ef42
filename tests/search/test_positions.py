"""The search for gather positions: against its two ends, torch's lowering, and brute force for the fewest gathers."""

import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Sharding, Task
from raypipe.schedule.kinds import READS_WEIGHTS
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.passes import shard
from raypipe.schedule.passes.shard import place, policy_windows
from raypipe.schedule.sharding import shard_peaks
from raypipe.schedule.verify import verify
from raypipe.search.gather_positions import fewest_gathers, gathered_early, gradients_used, once_within, search_gathers
from raypipe.simulate.engine import simulate

LETTERS = {"F": "F", "BW": "B", "B": "I", "W": "W"}
KINDS = {"UNSHARD": "AG", "RESHARD": "FREE", "REDUCE_GRAD": "RS"}


def torch_lowered(schedule, active):
    """The schedule with gathers, reshards and reductions where ``torch.distributed.pipelining`` itself puts them."""
    rows = []
    for order in schedule.orders:
        by_name = {f"{t.stage}{LETTERS[t.kind]}{t.mbs[0]}": t for t in order}
        actions = [torch_schedules._Action.from_str(name) for name in by_name]
        actions = torch_schedules._add_reduce_grad(actions, schedule.microbatches)
        lowered = torch_schedules._add_unshard_reshard(actions, active)
        rows.append([by_name.get(str(a)) or Task(KINDS[a.computation_type.name], a.stage_index, ()) for a in lowered])
    return schedule.with_orders(rows, sharding=Sharding(levels=(3,) * schedule.stages))


def makespan(schedule, costs):
    return simulate(schedule, costs).makespan


def ends(order, room, sizes, costs):
    """Makespans of the ends that fit: once per step, as much of that as memory holds, once per micro-batch."""
    sharding, result = Sharding(levels=(3,) * order.stages), {}
    for unit in (None, 1):
        used = [
            gradients_used(place(order, sharding, [{}] * order.devices, unit), d, sizes) for d in range(order.devices)
        ]
        for name in ("step", "once", "microbatch"):
            for ahead in (0, 1, 4, 10**6):
                windows = [
                    once_within(order, d, sizes, room[d]) if name == "once" else policy_windows(order, d, name)
                    for d in range(order.devices)
                ]
                early = [gathered_early(w, ahead, sizes, room[d], used[d]) for d, w in enumerate(windows)]
                if None not in early:
                    placed = place(order, sharding, early, unit)
                    if all(p <= r * (1 + 1e-9) for p, r in zip(shard_peaks(placed, sizes), room, strict=True)):
                        result[name] = min(result.get(name, float("inf")), makespan(placed, costs))
    return result


class Searched(NamedTuple):
    """One shape: torch's lowering and the placement that was searched, in as much memory."""

    slow: bool
    """Whether a gather takes several times as long as a forward."""
    costs: CostTable
    lowered: Schedule
    found: Schedule

    @property
    def gain(self):
        return makespan(self.lowered, self.costs) / makespan(self.found, self.costs)


def compare(rng):
    """Search one shape whose devices cannot hold all their stages gathered; no end that fits is faster."""
    devices, chunks = rng.choice([2, 4]), rng.choice([2, 4, 6])
    count = devices * rng.choice([1, 2, 3])
    active = rng.randint(1, min(3, chunks - 1))  # 3 is torch's default
    shape = Shape(devices=devices, microbatches=count, chunks=chunks)
    order = generate(rng.choice(["interleaved-1f1b", "bfs"]), shape)
    slow = rng.random() < 0.6
    ratio = rng.choice([4.0, 8.0, 16.0]) if slow else rng.choice([0.25, 1.0])  # gather over forward
    links = tuple(ratio * rng.uniform(0.9, 1.1) for _ in range(order.stages))
    costs = replace(CostTable.even(order.stages), gather=links, reduce_scatter=links)
    sizes = [1.0] * order.stages
    lowered = torch_lowered(order, active)
    verify(lowered)
    # As much memory as torch's takes, of which an activation takes a tenth of a stage's weights.
    total = max(a * 0.1 + r for a, r in zip(peak_activations(order), shard_peaks(lowered, sizes), strict=True))
    units = [u for u in range(devices, count + 1) if count % u == 0]
    others = [generate("bfs", shape), *(generate("zeropp", replace(shape, unit=u)) for u in units)]
    rooms = [[total - 0.1 * a for a in peak_activations(o)] for o in (order, *others)]
    fits = [(o, r) for o, r in zip((order, *others), rooms, strict=True) if min(r) >= 2.0]
    result = search_gathers(
        [o for o, _ in fits], [r for _, r in fits], costs, sizes, sharding=Sharding(levels=(3,) * order.stages),
        units=units,
    )  # fmt: skip
    verify(result.schedule)
    assert makespan(result.schedule, costs) == pytest.approx(result.makespan)
    assert all(p <= r + 1e-9 for p, r in zip(shard_peaks(result.schedule, sizes), fits[result.order][1], strict=True))
    for end, time in ends(order, rooms[0], sizes, costs).items():
        assert result.makespan <= time * (1 + 1e-9), end
    return Searched(slow, costs, lowered, result.schedule)


@pytest.mark.exhaustive
def test_a_hundred_shapes():
    """Never slower than either end (``compare``); 1.25x torch's lowering on half of those with a slow link.

    Torch's lowering is not among the placements that the search tries, and is 1 % faster on one of these shapes.
    """
    rng = random.Random(21)
    result = [compare(rng) for _ in range(100)]
    assert min(one.gain for one in result) >= 0.98
    slow = [one.gain for one in result if one.slow]
    assert len(slow) > 40
    assert sum(gain >= 1.25 for gain in slow) >= len(slow) / 2


@pytest.mark.slow
def test_a_few_shapes():
    rng = random.Random(4)
    result = [compare(rng) for _ in range(12)]
    assert min(one.gain for one in result) >= 0.98
    assert sum(one.slow and one.gain >= 1.25 for one in result) >= 3


def brute_force(stages, room):
    """Fewest loads of a sequence of stages into so many places, over all choices of what to drop."""
    states = {(): 0}
    for stage in stages:
        following = {}
        for kept, loads in states.items():
            if stage in kept:
                options = [(kept, loads)]
            else:
                options = [
                    (tuple(sorted((*rest, stage))), loads + 1)
                    for n in range(min(len(kept), room - 1) + 1) for rest in itertools.combinations(kept, n)
                ]  # fmt: skip
            for state, cost in options:
                following[state] = min(cost, following.get(state, 10**9))
        states = following
    return min(states.values())


def test_no_placement_has_fewer_gathers():
    rng = random.Random(6)
    for _ in range(200):
        stages, room = rng.randint(1, 5), rng.randint(1, 4)
        sequence = [rng.randrange(stages) for _ in range(rng.randint(1, 14))]
        order = [Task("F", stage, (n,)) for n, stage in enumerate(sequence)]
        windows = fewest_gathers(order, [1.0] * stages, room)
        assert sum(map(len, windows.values())) == brute_force(sequence, room)
        for k, task in enumerate(order):
            live = [(s, w) for (s, _), own in windows.items() for w in own if w.first <= k <= w.last]
            assert len(live) <= room
            assert task.stage in {s for s, _ in live}
    assert fewest_gathers(order, [5.0] * 5, 4.0) is None


def test_nothing_fits():
    order = generate("bfs", Shape(devices=2, microbatches=2, chunks=2))
    with pytest.raises(ScheduleError, match="no placement of gathers fits"):
        search_gathers(
            [order], [[1.0, 1.0]], CostTable.even(4), [1.0] * 4, sharding=Sharding(levels=(3,) * 4), units=(1, 2)
        )


def test_fs_zeropp_against_fs_1f1b_on_25_gb_s():
    """4 x 4 devices, 6.2 billion parameters in 16 bits, 8 micro-batches of 8192 tokens at 125 TFLOP/s.

    A whole device's gather over four copies takes 3/4 of 3.1 GB at 25 Gb/s. ZeroPP's FS-1F1B gathers 2B times; here it
    may even overlap all of that perfectly, and reduce once.
    """
    parameters, tokens, flops, link = 6.2e9, 8192, 125e12, 25e9 / 8
    forward = 2 * parameters / 4 * tokens / flops
    gather = parameters / 4 * 2 * 0.75 / link

    def costs(chunks):
        table = CostTable.even(4 * chunks, *[forward / chunks] * 3)
        times = (gather / chunks,) * (4 * chunks)
        return replace(table, gather=times, reduce_scatter=times)

    plain = generate("1f1b", Shape(devices=4, microbatches=8))
    one = makespan(shard(plain, 3, gather="microbatch"), costs(1))
    perfect = max(makespan(plain, costs(1)), (2 * 8 + 1) * gather)
    assert perfect <= one
    for chunks in (2, 4):
        order = generate("zeropp", Shape(devices=4, microbatches=8, chunks=chunks, unit=8))
        zeropp = makespan(shard(order, 3, unit=8, ahead=4), costs(chunks))
        assert perfect / zeropp >= 1.25
    assert {t.kind for t in order.orders[0]} & READS_WEIGHTS == {"F", "B"}
