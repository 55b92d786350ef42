"""Clusters with several kinds of device: stages weighed by their device's speed and memory, against brute force."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from raypipe.cost.kinds import of_kinds
from raypipe.cost.profile import LinkFit, Profile
from raypipe.errors import ScheduleError, SpecError
from raypipe.plan.best_first import best_first, rank_key
from raypipe.plan.candidate import Candidate, grids
from raypipe.plan.choice import deepest
from raypipe.plan.choose import choose
from raypipe.plan.cut.exact import cut_uneven
from raypipe.plan.predict.of_plan import on_hosts
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.plan.tensor_groups import ALONE, Judges
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.shape import Grid, Shape
from raypipe.simulate.engine import simulate
from tests.plan.conftest import make_job, make_profile

GIB = 2**30


def mixed(*kinds: tuple[int, float, float], layers: int = 6, **changes) -> Profile:
    """One host for each of (devices, times as slow, GiB of memory)."""
    profiles = []
    changes.setdefault("update_s_per_parameter", 0.0)
    for n, (devices, slow, memory) in enumerate(kinds):
        known = make_profile(layers, devices, devices_per_host=devices, memory_bytes=memory * GIB, **changes)
        profiles.append(known.at_speed(slow).model_copy(update={"device": f"kind {n}", "accelerator_type": f"K{n}"}))
    return of_kinds(profiles)


def every_cut(pieces: int, stages: int):
    """All first pieces of the stages."""
    for inner in itertools.combinations(range(1, pieces), stages - 1):
        yield (0, *inner)


def ranges(starts: tuple[int, ...], pieces: int):
    return tuple(map(range, starts, (*starts[1:], pieces)))


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_of_all(seed):
    rng = random.Random(seed)
    pieces, stages = rng.randint(4, 9), rng.randint(1, 4)
    costs = [[rng.randint(1, 9) * speed for _ in range(pieces)] for speed in rng.choices((1, 2, 5), k=stages)]

    def worst(starts):
        each = [sum(own[i] for i in part) for own, part in zip(costs, ranges(starts, pieces), strict=True)]
        return max(each), sum(t * t for t in each)

    assert worst(cut_uneven(costs)) == min(map(worst, every_cut(pieces, stages)))


def step_by_hand(profile: Profile, cut, grid: Grid, slow: list[int]) -> float:
    """1F1B's step with this cut, from the kinds' own layer times; ``slow`` says the kind of each stage's device."""

    def total(task: str) -> tuple[float, ...]:
        return tuple(
            sum(getattr(profile.kinds[kind].layers[i].times[grid.microbatch], task) for i in part)
            for kind, part in zip(slow, cut, strict=True)
        )

    forward, joint = total("forward"), total("joint")
    sent = [profile.layers[part[-1]].output_bytes * grid.microbatch for part in cut[:-1]]
    links = [
        max((kinds.between if a != b else kinds.inside).seconds(size) for kinds in (profile.kinds[a], profile.kinds[b]))
        for (a, b), size in zip(itertools.pairwise(slow), sent, strict=True)
    ]
    zeros = (0.0,) * len(cut)
    costs = CostTable(
        forward=forward, input_grad=zeros, weight_grad=joint, recompute=zeros, all_reduce=zeros, update=zeros,
        comm=tuple(links),
    )  # fmt: skip
    schedule = generate("1f1b", Shape(devices=grid.stages, microbatches=grid.microbatches))
    return simulate(schedule, costs).makespan


@pytest.mark.parametrize("slow", [1.0, 1.7, 3.0])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2)])
def test_slow_devices_get_small_stages(slow, counts):
    """The planner's cut is within 2 % of the best of all cuts, its prediction what the kinds' own times give."""
    profile, stages = mixed((counts[0], 1.0, 8), (counts[1], slow, 8)), sum(counts)
    job = make_job()
    predictor = Predictor(without_noise(profile), job.train, deepest(job, profile))
    grid = Grid(stages=stages, replicas=1, microbatch=1, microbatches=8)
    p = predictor.predict(Candidate.on(grid, "1f1b", update="wait"))
    of_stage = [0] * counts[0] + [1] * counts[1]
    assert p.compute_s == pytest.approx(step_by_hand(profile, p.cut, grid, of_stage), rel=1e-9)
    best = min(
        step_by_hand(profile, ranges(starts, 8), grid, of_stage) for starts in every_cut(8, stages)
    )  # fmt: skip
    assert p.compute_s <= best * 1.02
    if slow == 3.0:
        work = [sum(profile.layers[i].times[1].forward for i in part) for part in p.cut]
        assert max(work[counts[0] :]) < 0.6 * min(work[: counts[0]])


@pytest.mark.slow
def test_small_devices_get_what_they_hold():
    """The fastest cut does not fit the small device; the one taken does, and is the fastest of those that fit."""
    profile = mixed((1, 1.0, 8), (1, 1.0, 0.45))
    job = make_job()
    predictor = Predictor(without_noise(profile), job.train, deepest(job, profile), recompute=())
    plain = Candidate.on(Grid(stages=2, replicas=1, microbatch=2, microbatches=4), "1f1b", update="wait")
    p = predictor.predict(plain)
    assert not p.fits
    assert p.fullest == 1
    ((_, within),) = predictor.oom_fallback(p)
    result = predictor.predict(within)
    assert result.fits
    assert len(result.cut[1]) < len(p.cut[1])
    fitting = []
    for starts in every_cut(8, 2):
        cut = ranges(starts, 8)
        memory = predictor.memory_with(plain, cut)
        if memory[0].total <= 8 * GIB and memory[1].total <= 0.45 * GIB:
            fitting.append(step_by_hand(profile, cut, plain.grid, [0, 1]))
    assert result.compute_s == pytest.approx(min(fitting), rel=1e-9)
    decision = choose(job, profile, search_s=0)
    assert decision.best.fits


def test_every_copy_takes_its_share_of_each_kind():
    """Two copies of two stages: a fast and a slow device each, and no faster than one copy on a host of its own."""
    profile = mixed((2, 1.0, 8), (2, 2.0, 8))
    predictor = Predictor(without_noise(profile), make_job().train, 6)
    grid = Grid(stages=2, replicas=2, microbatch=1, microbatches=4)
    costs = predictor.costs(Candidate.on(grid, "1f1b"))
    alone = Predictor(without_noise(mixed((1, 1.0, 8), (1, 2.0, 8))), make_job().train, 6)
    same = alone.costs(Candidate.on(replace(grid, replicas=1), "1f1b"))
    assert costs.forward == same.forward
    assert costs.weight_grad == same.weight_grad
    data_parallel = predictor.costs(Candidate.on(Grid(1, 4, 1, 2), "1f1b"))
    slow = sum(layer.times[1].forward for layer in profile.kinds[1].layers)
    assert data_parallel.forward[0] == pytest.approx(slow)  # all copies wait for the slowest


@pytest.mark.parametrize("clip", [None, 1.0])
def test_nothing_better_is_missed(clip):
    """The search's bounds hold where devices differ: it finds what timing every candidate finds."""
    profile = mixed((2, 1.0, 8), (1, 2.5, 8), layers=4)
    job = make_job(4, 6, **({} if clip is None else {"clip": clip}))
    judge, every = Predictor(profile, job.train, 4), list(grids(3, 6, 4, 1, 16))

    def flushing(c: Candidate) -> Candidate | None:
        return c if c.form.versions == "flush" else None

    timed = []
    for grid in every:
        for c in filter(None, map(flushing, judge.on(grid))):
            with suppress(ScheduleError):
                p = judge.predict(c)
                assert judge.least(c) <= p.step_s * (1 + 1e-9)
                assert judge.least_on(grid) <= p.step_s * (1 + 1e-9)
                timed.append(p)
    assert best_first(Judges({ALONE: judge}), every, 3, flushing).best[0].step_s == pytest.approx(
        min(timed, key=rank_key).step_s, rel=1e-6
    )


@pytest.mark.slow
def test_the_plan_says_which_devices_it_is_for():
    profile = mixed((2, 1.0, 8), (2, 30.0, 8))
    decision = choose(make_job(), profile, search_s=0)
    plan = decision.plan
    assert plan.made_for.kinds == ("K0",)  # the slow ones would only hold it up
    assert plan.made_for.hosts == (plan.parallel.stages * plan.parallel.replicas,)
    assert "kind 0 + kind 1" in decision.notes[0]
    used = choose(make_job(), mixed((1, 1.0, 8), (1, 1.3, 8)), search_s=0).plan
    assert (used.made_for.kinds, used.made_for.hosts) == (("K0", "K1"), (1, 1))
    with pytest.raises(SpecError, match="of several kinds"):
        choose(make_job(), profile, 5, search_s=0)


def test_kinds_taken_apart_and_joined_are_the_same():
    whole = mixed((2, 1.0, 8), (1, 2.0, 8), (4, 5.0, 8))
    assert [kind.devices for kind in whole.kinds] == [2, 1, 4]
    again = of_kinds(whole.kinds)
    assert (again.devices, again.hosts, again.kind_of_host) == (7, (2, 1, 4), (0, 1, 2))


def test_kinds_that_cannot_be_joined_are_refused():
    with pytest.raises(SpecError, match="other layers"):
        of_kinds([make_profile(4), make_profile(5)])
    with pytest.raises(ValueError, match="kind_of_host"):
        Profile.model_validate({**dict(make_profile(4)), "other_kinds": (make_profile(4),)})


def test_on_other_hosts_of_the_kinds_it_is_predicted_anew():
    """The devices of each kind are on hosts of their own instead of on one: links between hosts count."""
    slow = LinkFit(alpha_s=0.02, beta_s_per_byte=0.0)
    profile = mixed((2, 1.0, 8), (1, 1.3, 8), between=slow)
    job = make_job(parallel={"auto": True, "schedule": "1f1b", "stages": 3})
    plan = choose(job, profile, search_s=0).plan
    assert (plan.made_for.hosts, plan.made_for.kinds) == ((2, 1), ("K0", "K1"))
    assert on_hosts(plan, job, (2, 1), profile, ("K0", "K1")) is None
    apart = on_hosts(plan, job, (1, 1, 1), profile, ("K0", "K0", "K1"))
    assert apart.plan.predicted_step_s > plan.predicted_step_s
    assert apart.plan.made_for.kinds == ("K0", "K0", "K1")
    assert "(K0, K1), runs on 1 + 1 + 1 devices on 3 hosts (K0, K0, K1)" in apart.message
    assert on_hosts(apart.plan, job, (1, 1, 1), profile, ("K0", "K0", "K1")) is None
    strange = on_hosts(plan, job, (2, 1), profile, ("K0", "K9"))
    assert strange.plan.predicted_step_s is None
    one_kind = choose(job, make_profile(devices=4), search_s=0).plan
    assert on_hosts(one_kind, job, one_kind.made_for.hosts, None, ("K0", "K1")).plan.predicted_step_s is None
