"""Devices that turn slow are named, and devices of a busy machine are not; steps are made by hand, with noise."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe.cost.profile import Profile
from raypipe.plan.choose import choose
from raypipe.plan.online.recorded_steps import RecordedStep, RecordedSteps
from raypipe.plan.online.stragglers import Stragglers, at_speeds, choose_at, step_at
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.plan.watch import ENDLESS
from raypipe.schedule.ir import Schedule
from tests.explain.simulated_steps import whole_step
from tests.plan.conftest import make_job, make_profile

DEVICES = 4


class Devices:
    """Four devices whose tasks take a second each, times what is wrong and some noise; nobody ever waits."""

    def __init__(self, seed: int = 0, noise: float = 0.0, task_s: float = 1.0, replicas: int = 1) -> None:
        self.draw, self.noise, self.task_s = np.random.default_rng(seed), noise, task_s
        self.steps = 0
        self.begin(whole_step(devices=DEVICES // replicas, replicas=replicas))

    def begin(self, schedule: Schedule) -> None:
        self.recorded = RecordedSteps(schedule)

    def step(self, factors: Any) -> Any:
        """The clock after one more step in which devices took so many times as long as usual."""
        self.steps += 1
        times = []
        for order, factor in zip(self.recorded.schedule.orders, np.broadcast_to(factors, DEVICES), strict=True):
            each = self.task_s * factor * np.exp(self.noise * self.draw.standard_normal(len(order)))
            ends = np.cumsum(each)
            times.append(np.stack([ends - each, ends], axis=1))
        self.recorded.add(RecordedStep(self.steps, tuple(times)), follows=True)
        return SimpleNamespace(recorded=self.recorded)


def named(watch: Stragglers, devices: Devices, steps: int, factors: Any = 1.0) -> list[tuple[int, int, float]]:
    """(step from the first of these, device, how slow) of what is named in some steps."""
    result = []
    for step in range(1, steps + 1):
        events = watch.observe(devices.step(factors))
        result += [(step, one.fields["device"], one.fields["slowdown"]) for one in events]
    return result


@pytest.mark.parametrize("seed", range(5))
def test_a_device_at_half_its_speed_is_named_within_twenty_steps_and_told_when_it_recovers(seed: int) -> None:
    watch, devices = Stragglers(), Devices(seed, noise=0.3)
    assert named(watch, devices, 40) == []
    ((after, device, factor),) = named(watch, devices, 40, [1, 1, 2, 1])
    assert after <= 20
    assert (device, factor) == (2, pytest.approx(2.0, rel=0.15))
    assert watch.slow == {2: factor}
    ((after, device, factor),) = named(watch, devices, 40)
    assert after <= 20
    assert (device, factor, watch.slow) == (2, 1.0, {})


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_machine_has_no_stragglers(seed: int) -> None:
    """Tasks vary by a third, one step in six takes one device three times as long, and in the end all are slower."""
    watch, devices, draw = Stragglers(), Devices(seed, noise=0.3), np.random.default_rng(seed)
    for step in range(300):
        hit = np.where((np.arange(DEVICES) == draw.integers(DEVICES)) & (draw.random() < 1 / 6), 3.0, 1.0)
        assert watch.observe(devices.step(hit * (2.0 if step > 150 else 1.0))) == []


def test_short_steps_are_judged_several_at_a_time() -> None:
    """Of 24 tasks a device, at 0.1 ms: half a second is 200 steps, and one that lasts for 20 of them is a moment."""
    watch, devices = Stragglers(), Devices(task_s=1e-4)
    assert named(watch, devices, 2000) == []
    assert named(watch, devices, 20, [3, 1, 1, 1]) == []
    assert named(watch, devices, 1000) == []
    assert [device for _, device, _ in named(watch, devices, 1000, [3, 1, 1, 1])] == [0]


def test_a_copy_that_is_slow_from_the_start_is_named_beside_its_twin() -> None:
    watch, devices = Stragglers(), Devices(replicas=2)
    ((_, device, factor),) = named(watch, devices, 40, [1, 1, 1, 1.8])
    assert (device, factor) == (3, pytest.approx(1.8))
    assert named(Stragglers(alike=False), Devices(replicas=2), 40, [1, 1, 1, 1.8]) == []


def test_a_known_straggler_stays_one_under_another_plan() -> None:
    watch, devices = Stragglers({1: 2.0}), Devices()
    assert named(watch, devices, 40, [1, 2, 1, 1]) == []
    devices.begin(whole_step("zb-h1"))  # it splits backward passes
    assert named(watch, devices, 40, [1, 2, 1, 1]) == []
    assert [(device, factor) for _, device, factor in named(watch, devices, 40)] == [(1, 1.0)]


def test_what_is_usual_stays_so_in_another_order() -> None:
    watch, devices = Stragglers(), Devices()
    assert named(watch, devices, 20) == []
    devices.begin(whole_step("gpipe"))
    ((after, device, factor),) = named(watch, devices, 20, [1, 2, 1, 1])
    assert (after < 20, device, factor) == (True, 1, pytest.approx(2.0))


def slowest(profile: Profile, factors: tuple[float, ...], starts: tuple[int, ...]) -> float:
    """The most work of a device for a micro-batch of one sample, whose stages begin with these layers."""
    bounds, times = (*starts, len(profile.layers)), [layer.times[1] for layer in profile.layers]
    stages = [times[a:b] for a, b in pairwise(bounds)]
    return max(f * sum(t.forward + t.joint for t in stage) for f, stage in zip(factors, stages, strict=True))


@pytest.mark.parametrize("device", range(DEVICES))
def test_the_plan_for_a_slow_device_gives_it_less(device: int) -> None:
    """Of all cuts, one whose slowest stage is the fastest."""
    job = make_job(layers=14, parallel={"auto": True, "schedule": "1f1b", "replicas": 1, "microbatch": 1})
    profile = make_profile(layers=14, devices_per_host=DEVICES)
    plan = choose(job, profile, DEVICES, search_s=0).plan
    assert step_at(job, profile, plan, {}) == pytest.approx(PlanPredictor(job, profile).time(plan).step, rel=0.01)
    slow = {device: 2.0}
    better = choose_at(job, profile, DEVICES, slow, 0, ENDLESS)
    assert better.parallel.devices == DEVICES
    assert better.predicted_step_s == pytest.approx(step_at(job, profile, better, slow))
    assert better.predicted_step_s < 0.9 * step_at(job, profile, plan, slow)
    speeds = tuple(slow.get(d, 1.0) for d in range(DEVICES))
    assert at_speeds(profile, speeds).placed.of_first(DEVICES) == (1,) * DEVICES
    cuts = ((0, *starts) for starts in combinations(range(1, len(profile.layers)), DEVICES - 1))
    chosen = tuple(stage[0] for stage in better.cut)
    assert slowest(profile, speeds, chosen) == pytest.approx(min(slowest(profile, speeds, cut) for cut in cuts))
