"""Sharded data parallelism as tasks: the papers' gather counts, the verifier's refusals, what the clock makes of it.

The counts are the formulas of ZeroPP, section 3.3 and 3.4, in gathers of a whole stage: L / (P*V) layers each.
"""

import random
from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.forms.json_form import from_json, to_json
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Sharding, Task
from raypipe.schedule.kinds import READS_WEIGHTS, WEIGHT_GRADIENTS
from raypipe.schedule.passes import (
    add_recompute,
    add_updates,
    forwards_alone,
    place_gradient_sync,
    replicate,
    shard,
    split_backward,
)
from raypipe.schedule.sharding import collectives
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period


def gathers(schedule):
    return {sum(task.kind == "AG" for task in order) for order in schedule.orders}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_gather_counts(devices, chunks):
    """Per device and step, for L = 12 P V layers: FS-1F1B 2BL/P, FS-BFSPP L(2V-1)/(PV), FS-ZeroPP BL(2V-1)/(UPV)."""
    layers, each = 12 * devices * chunks, 12
    for count in (1, 2, 4, 7, 8, 16):
        plain = shard(generate("1f1b", Shape(devices=devices, microbatches=count)), 3, gather="microbatch")
        assert gathers(plain) == {2 * count}
        assert 2 * count * (12 * chunks) == 2 * count * layers // devices  # one stage holds L/P layers
        first = shard(generate("bfs", Shape(devices=devices, microbatches=count, chunks=chunks)), 3)
        assert {n * each for n in gathers(first)} == {layers * (2 * chunks - 1) // (devices * chunks)}
        for unit in (n for n in range(1, count + 1) if count % n == 0):
            shape = Shape(devices=devices, microbatches=count, chunks=chunks, unit=unit)
            zeropp = shard(generate("zeropp", shape), 3, unit=unit)
            assert {n * each * unit for n in gathers(zeropp)} == {
                count * layers * (2 * chunks - 1) // (devices * chunks)
            }
        for schedule in (plain, first, zeropp):
            verify(add_updates(schedule))


def random_schedule(rng):
    name = rng.choice(["gpipe", "1f1b", "interleaved-1f1b", "bfs", "chimera", "gems", "zb-h1", "zb-v", "zeropp"])
    devices = rng.choice([2, 4])
    chunks = rng.randint(1, 3) if name in ("interleaved-1f1b", "bfs", "zeropp") else 1
    schedule = generate(name, Shape(devices=devices, microbatches=devices * rng.randint(1, 3), chunks=chunks))
    if rng.random() < 0.3:
        schedule = add_recompute(schedule, "early")
    if rng.random() < 0.3:
        schedule = split_backward(schedule)
    return schedule


def played(schedule):
    """The invariants, told once more without the verifier: what each device has gathered and what it has summed."""
    for order in schedule.orders:
        full, due = set(), set()
        for kind, stage, _, replica in order:
            level, key = schedule.zero_level(stage), (stage, replica)
            if kind in READS_WEIGHTS and level:
                assert key in full
            if kind in WEIGHT_GRADIENTS and level:
                due.add(key)
            elif kind == "AG":
                assert key not in full
                full.add(key)
            elif kind == "FREE":
                full.remove(key)
            elif kind == "RS":
                due.discard(key)
            elif kind == "U":
                assert key not in due
        assert not due
        assert all(schedule.zero_level(stage) < 3 for stage, _ in full)


@pytest.mark.slow
def test_any_schedule_any_level_any_policy():
    rng = random.Random(13)
    for _ in range(200):
        bare = random_schedule(rng)
        copies = rng.choice([1, 2, 4])
        levels = [rng.randint(0, 3) for _ in range(bare.stages)]
        how = {
            "gather": rng.choice(["step", "unit", "microbatch"]), "unit": rng.choice([None, 1, 2, 3]),
            "ahead": rng.choice([0, 1, 3, 100]), "group": rng.choice([None, 1, copies]),
        }  # fmt: skip
        one = add_updates(place_gradient_sync(shard(bare, levels, **how), "eager"))
        verify(one)
        played(one)
        before = shard(replicate(bare, copies), levels, copies=copies, **how)
        after = replicate(shard(bare, levels, **how), copies)
        assert before == after
        whole = add_updates(place_gradient_sync(before, "lazy"))
        verify(whole)
        played(whole)
        assert from_text(to_text(whole)) == whole
        costs = CostTable.even(bare.stages, recompute=0.5)
        costs = replace(costs, gather=tuple(rng.random() for _ in costs.forward), reduce_scatter=costs.forward)
        timeline = simulate(whole, costs)
        assert from_json(to_json(whole, costs, timeline.spans))[0] == whole
        assert period(whole, costs) <= timeline.makespan * (1 + 1e-9)
        # Without what the pass added, the schedule is the one it was made of.
        stripped = shard(before, 0)
        assert stripped.orders == replicate(bare, copies).orders
        assert stripped.sharding is None


def tiny():
    return from_text("zero 3 3\ndevice 0: 0AG 0F0 0FREE 0AG 0BW0 0FREE 0RS 0U\ndevice 1: 1AG 1F0 1BW0 1FREE 1RS 1U\n")


def test_the_tiny_one_is_valid():
    verify(tiny())


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0F0 0AG 0BW0 0FREE 0RS 0U", "the weights of stage 0 are sharded here"),
        ("0AG 0F0 0FREE 0BW0 0RS 0U", "the weights of stage 0 are sharded here"),
        ("0AG 0F0 0AG 0BW0 0FREE 0RS 0U", "gathered already"),
        ("0AG 0F0 0BW0 0RS 0U", "still gathered"),
        ("0AG 0F0 0BW0 0RS", "stays gathered"),
        ("0AG 0FREE 0AG 0F0 0BW0 0FREE 0RS 0U", "no task has read the weights"),
        ("0AG 0F0 0BW0 0FREE 0FREE 0RS 0U", "no task has read the weights"),
        ("0AG 0F0 0BW0 0FREE 0U", "without an RS"),
        ("0AG 0F0 0BW0 0FREE", "never reduce-scattered"),
        ("0AG 0F0 0BW0 0FREE 0RS 0RS 0U", "no gradients since"),
        ("0AG 0F0 0RS 0BW0 0FREE 0U", "without an RS"),
    ],
)
def test_refused(row, why):
    good = to_text(tiny()).splitlines()
    text = "\n".join(f"device 0: {row}" if line.startswith("device 0") else line for line in good)
    if "0U" not in row:
        text = text.replace(" 1U", "")
    with pytest.raises(ScheduleError, match=why):
        verify(from_text(text))


def test_refused_as_a_whole():
    bare = generate("1f1b", Shape(devices=2, microbatches=2))
    sharded = shard(bare, 3)
    with pytest.raises(ScheduleError, match="not sharded"):
        verify(replace(sharded, sharding=None))
    with pytest.raises(ScheduleError, match="levels"):
        verify(replace(sharded, sharding=Sharding(levels=(3,))))
    with pytest.raises(ScheduleError, match="ZeRO level 2"):
        verify(replace(sharded, sharding=Sharding(levels=(2, 2))))
    with pytest.raises(ScheduleError, match="divisor of the copies"):
        verify(shard(replicate(bare, 4), 3, copies=4, group=3))
    with pytest.raises(ScheduleError, match="older versions"):
        shard(generate("pipedream", Shape(devices=2, microbatches=2)), 3)
    with pytest.raises(ScheduleError, match='"often" is unknown'):
        shard(bare, 3, gather="often")
    with pytest.raises(ScheduleError, match="use 0, 1, 2 or 3"):
        shard(bare, 4)


def test_copies_that_issue_their_collectives_in_another_order_are_refused():
    one = shard(generate("bfs", Shape(devices=2, microbatches=2, chunks=2)), 3, ahead=9)
    two = add_updates(replicate(one, 2))
    verify(two)
    order = list(two.orders[2])
    a, b = (k for k, task in enumerate(order) if task.kind == "RS")
    assert order[a].stage != order[b].stage
    verify(two.with_orders([*two.orders[:2], order, two.orders[3]]))
    moved = [task for k, task in enumerate(order) if k != a]
    moved.insert(b, order[a])
    with pytest.raises(ScheduleError, match="issues other collectives than device 0"):
        verify(two.with_orders([*two.orders[:2], moved, two.orders[3]]))


def test_groups():
    """Four copies of Chimera's two directions, shards within pairs of copies: a group has one direction of a pair."""
    whole = shard(replicate(generate("chimera", Shape(devices=2, microbatches=2)), 4), 3, copies=4, group=2)
    sharding = whole.sharding
    assert [sharding.members(r, 8) for r in range(8)] == [
        (0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7),
    ]  # fmt: skip
    result = {}
    graph = link(whole)
    for i, one in collectives(graph).items():
        result.setdefault(one, []).append(graph.tasks[i].replica)
    assert all(tuple(sorted(v)) == sharding.members(v[0], 8) for v in result.values())


def test_a_gather_takes_a_link_and_not_a_device():
    """One device, two stages: F0 F1 BW1 BW0 take 1, 1, 2, 2; gathers 3, reduce-scatters 5 each."""
    bare = generate("bfs", Shape(devices=1, microbatches=1, chunks=2))
    costs = replace(CostTable.even(2), gather=(3.0, 3.0), reduce_scatter=(5.0, 5.0))
    # Gathers at 0 and at 3 (issued with F0's start, waits for the link); F0 3-4, F1 6-7, BW1 7-9,
    # gather 0 is issued when F1 ends: 7-10; BW0 10-12, RS1 10-15, RS0 15-20.
    early = simulate(shard(bare, 3, ahead=1), costs)
    spans = {(str(s.task), s.start): s.end for s in early.spans[0]}
    assert spans["0F0", 3.0] == 4.0
    assert spans["1AG", 3.0] == 6.0
    assert early.makespan == 20.0
    # Issued only when needed: F0 3-4, gather 4-7, F1 7-8, BW1 8-10, gather 10-13, RS1 13-18, BW0 13-15, RS0 18-23.
    assert simulate(shard(bare, 3, ahead=0), costs).makespan == 23.0
    # Once per step, without the third gather: BW0 9-11, RS1 9-14, RS0 14-19.
    once = simulate(shard(bare, 3, gather="step", ahead=9), costs)
    assert once.makespan == 19.0
    assert sum(task.kind == "AG" for task in once.schedule.orders[0]) == 2


def test_at_most_one_reduce_scatter_is_under_way_beside_a_new_gradient_buffer():
    order = "0AG 0F0 0F1 0F2 0F3 0BW0 0RS 0BW1 0RS 0BW2 0RS 0BW3 0RS 0FREE 0U"
    schedule = from_text(f"zero 3\ndevice 0: {order}\n")
    verify(schedule)
    costs = replace(CostTable.even(1), reduce_scatter=(10.0,))
    starts = [s.start for s in simulate(schedule, costs).spans[0] if s.task.kind == "BW"]
    # RS at 6-16, 16-26, 26-36: the third backward waits for the first RS, the fourth for the second.
    assert starts == [4.0, 6.0, 16.0, 26.0]
    level_1 = replace(schedule, sharding=Sharding(levels=(1,)))
    assert Task("FREE", 0, ()) in level_1.orders[0]
    with pytest.raises(ScheduleError, match="ZeRO level 1"):
        verify(level_1)


def test_the_next_step_gathers_what_the_update_made():
    """One stage, one micro-batch, levels 1 and 3: gather 2, F 1, BW 2, RS 4, U 3, and nothing overlaps."""
    costs = replace(CostTable.even(1), gather=(2.0,), reduce_scatter=(4.0,), update=(3.0,))
    for level in (1, 2, 3):
        schedule = add_updates(shard(generate("gpipe", Shape(devices=1, microbatches=1)), level))
        assert period(schedule, costs) == pytest.approx(12.0)


def test_sharded_gradients_are_summed_over_the_directions_by_their_shards():
    """With a second direction the shards' AR waits for the RS of both, and U for the AR."""
    one = add_updates(place_gradient_sync(shard(generate("chimera", Shape(devices=2, microbatches=2)), 3), "eager"))
    graph = link(one)
    for i, task in enumerate(graph.tasks):
        if task.kind == "AR":
            assert {graph.tasks[p].kind for p in graph.preds[i]} == {"RS"}
            assert len(graph.preds[i]) == 2
        if task.kind == "U":
            assert [graph.tasks[p].kind for p in graph.preds[i]] == ["AR"]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["lazy", "eager-opt", "eager"])
def test_gathers_never_wait_for_sums_that_wait_for_them(sync):
    """An all-reduce that a gather queues behind may wait for a device that waits for what the gather is for."""
    rng = random.Random(7)
    for devices in (4, 6, 8):
        for pipelines in (n for n in range(2, devices + 1, 2) if devices % n == 0):
            for microbatches in range(2, 2 * devices + 3):
                bare = generate("chimera", Shape(devices=devices, microbatches=microbatches, pipelines=pipelines))
                costs = CostTable.even(devices)
                costs = replace(costs, gather=tuple(rng.uniform(0, 3) for _ in costs.forward), comm=rng.random())
                for gather in ("unit", "microbatch"):
                    placed = place_gradient_sync(shard(bare, 3, gather=gather), sync, rng.choice([None, costs]))
                    verify(add_updates(placed))


def test_forwards_alone():
    """Validation gathers every stage once for all its forwards, and reduces nothing."""
    bare = generate("zeropp", Shape(devices=2, microbatches=4, chunks=2, unit=2))
    assert forwards_alone(bare).orders == tuple(tuple(t for t in o if t.kind == "F") for o in bare.orders)
    for level in (1, 3):
        result = forwards_alone(shard(bare, level, unit=2))
        for order in result.orders:
            kinds = [t.kind for t in order]
            assert (kinds.count("F"), kinds.count("AG")) == (8, 2)
            assert kinds.count("FREE") == (2 if level == 3 else 0)
            assert len(kinds) == 8 + 2 + kinds.count("FREE")
            assert kinds[0] == "AG"
