"""The kernels of the walk over arrangements: moves, least steps, and what stages take."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from raypipe.cost.memory import parameter_bytes, stage_memory
from raypipe.cost.stages import frozen_stages, stage_costs
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.instance import alike
from raypipe.plan.joint.annealing import LeastStep, annealed
from raypipe.plan.joint.arrangement import Arrangement, StageTables, of_layers
from raypipe.plan.joint.walk_kernel import move
from raypipe.schedule.shape import Grid
from raypipe.search.order_walk import seed_of
from tests.plan.conftest import make_job, make_profile
from tests.plan.joint.least_in_python import InPython


def drawn(rng: random.Random, layers: int, devices: int) -> Arrangement:
    """Any arrangement that leaves no device without a layer."""
    row = [*range(devices), *(rng.randrange(devices) for _ in range(layers - devices))]
    rng.shuffle(row)
    return of_layers(row)


@pytest.mark.parametrize("seed", range(4))
def test_moves_keep_every_layer_once_and_every_device_at_work(seed) -> None:
    rng = random.Random(seed)
    layers, devices = rng.randint(6, 12), rng.randint(2, 4)
    a, random_numbers = of_layers([k % devices for k in range(layers)]), seed_of(rng)
    most = layers - 1 if len(a.row) < layers else layers
    seen = set()
    for _ in range(600):
        starts, row = a.arrays(most)
        device = rng.choice((-1, rng.randrange(devices)))
        held = row.astype(float)  # what is known of a stage goes where the stage goes
        count = move(starts, row, held, len(a.row), layers, devices, most, 0.4, device, random_numbers)
        if not count:
            continue
        changed = sum(x != y for x, y in zip(held[:count].tolist(), row[:count].tolist(), strict=True))
        assert changed <= (2 if count == len(a.row) else 1)
        b = Arrangement.of(starts, row, count, layers)
        assert [i for own in b.cut for i in own] == list(range(layers))
        assert all(len(own) for own in b.cut)
        assert set(b.row) == set(range(devices))
        assert len(b.row) == len(b.starts) <= most
        seen.add((len(b.row) - len(a.row), b.starts == a.starts, b.row == a.row))
        a = b
    # A stage more, one fewer, another device in the same cut, and another border between the same devices.
    assert {more for more, _, _ in seen} == {-1, 0, 1}
    assert {(0, True, False), (0, False, True)} <= seen


@pytest.mark.parametrize("seed", range(12))
def test_least_steps_are_those_of_plain_python(seed) -> None:
    rng = random.Random(seed)
    layers, devices = rng.randint(4, 12), rng.randint(2, 4)
    f, b, w, kept = ([rng.choice((1.0, rng.uniform(0.1, 3))) for _ in range(layers)] for _ in range(4))
    if seed % 3 == 1:
        kept[0] = w[1] = 0.0
    room = inf if seed % 4 == 0 else rng.uniform(0.5, 3) * sum(kept) / devices
    i = alike(f, b, w, devices, rng.randint(1, 9), message=rng.choice((0.0, 0.3)), room=room, kept=kept)
    i = replace(i, barrier=seed % 2 == 0)
    least, python = LeastStep(i), InPython(i)
    for _ in range(30):
        a = drawn(rng, layers, devices)
        assert least.of(a) == pytest.approx(max(python.devices(a)), rel=1e-12)


def test_a_walk_by_least_steps_finds_a_better_arrangement() -> None:
    rng = random.Random(3)
    times = [rng.uniform(1, 2) for _ in range(16)]
    least = LeastStep(alike(times, times, times, 4, 8))
    a = Arrangement((0, 2, 4, 6), (0, 1, 2, 3), 16)
    result = annealed(least, a, 16, 3000, rng, 0.4)
    assert set(result.row) == {0, 1, 2, 3}
    assert least.of(result) < 0.9 * least.of(a)
    assert least.of(result) >= 8 * 3 * sum(times) / 4


@pytest.mark.parametrize("seed", range(3))
def test_stages_take_what_the_cost_table_and_the_memory_model_say(seed) -> None:
    rng = random.Random(seed)
    layers, devices, per_host = 7, 4, rng.choice((2, 4))
    profile = make_profile(layers=layers, devices=devices * 2, seed=seed, devices_per_host=per_host)
    if seed:
        still = tuple(
            layer.model_copy(update={"trained_parameters": 0}) if n < 2 * seed else layer
            for n, layer in enumerate(profile.layers)
        )
        profile = profile.model_copy(update={"layers": still})
    job = make_job(layers=layers, batch=16)
    c = Candidate.on(Grid(devices, 2, 1, 8), "auto", placement="free")
    layers = len(profile.layers)
    each = parameter_bytes(profile.dtype, job.train.optimizer, job.train.momentum)
    tables = StageTables(profile, job.train, c)
    for _ in range(12):
        a = drawn(rng, layers, devices)
        stages = tables.of(*a.arrays(layers), len(a.row))
        assert stages is not None
        costs = stage_costs(profile, a.cut, c.microbatch, (a.row,), copies=2, split=True)
        assert stages.times.T.tolist() == [list(costs.forward), list(costs.input_grad), list(costs.weight_grad)]
        assert stages.frozen == frozen_stages(profile, a.cut)
        links = costs.comm if isinstance(costs.comm, tuple) else (costs.comm,) * len(a.row)
        for s in range(len(a.row) - 1):
            assert stages.lag[s] == links[s] or a.row[s] == a.row[s + 1]
        whole = [stage_memory(profile, own, c.microbatch, each, split=True) for own in a.cut]
        for d in range(devices):
            own = [s for s, device in enumerate(a.row) if device == d]
            kept = [max(whole[s].kept, whole[s].kept_for_w) for s in own]
            unit = sum(kept) / len(kept)
            assert [stages.sizes[s, 0] * unit for s in own] == pytest.approx(kept)
            assert [stages.sizes[s, 1] * unit for s in own] == pytest.approx([whole[s].kept_for_w for s in own])
    tables.tables.room[:] = 1.0
    assert tables.of(*a.arrays(layers), len(a.row)) is None
