"""How many copies divide experts is chosen with all else: held against a choice for each number alone."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from raypipe.cost.layer_work import ExpertsWork
from raypipe.cost.profile import ExpertsProfile, Profile, TakenFor
from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.plan.candidate import Candidate, Recompute, grids
from raypipe.plan.choose import choose
from raypipe.plan.decision_json import as_json
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import ALONE, Judges, Sharing, measured_with_experts
from raypipe.schedule.shape import Grid
from tests.exhaustive import exhaustive
from tests.plan.conftest import make_job, make_profile

NUMBERS = (2, 4)


def mixtures(memory_gib: float, sent_bytes: float) -> dict[Sharing, Profile]:
    """A model of which three quarters are experts, by the copies that divide these; their kernels are a tenth faster
    where twice as many tokens come together."""
    whole = make_profile(layers=4, devices=4, memory_bytes=memory_gib * 2**30)
    result = {ALONE: whole}
    for n in NUMBERS:
        layers = tuple(
            layer.model_copy(
                update={
                    "parameters": layer.parameters // 4 + 3 * layer.parameters // 4 // n,
                    "expert_parameters": 3 * layer.parameters // 4 // n,
                    "exchanged_bytes": sent_bytes,
                    "times": {size: t.scaled(0.9 ** (n // 2)) for size, t in layer.times.items()},
                }
            )
            for layer in whole.layers
        )
        result[Sharing(experts=n)] = whole.model_copy(update={"layers": layers, "experts": n})
    return result


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_levels_of_sharding_leave_experts_and_their_gradients_as_they_are(recompute: Recompute) -> None:
    """Copies divide experts, and nothing of them again: of layers of nothing else, every level takes as much memory."""
    whole = make_profile(layers=4, devices=4)
    layers = tuple(
        layer.model_copy(update={"expert_parameters": layer.parameters, "kept_bytes": 1.0}) for layer in whole.layers
    )
    profile = whole.model_copy(update={"layers": layers, "experts": 2})
    judge = Predictor(profile, make_job(layers=4).train, 6)
    plain = Candidate.on(Grid(2, 2, 1, 4, experts=2), "1f1b", recompute=recompute)
    undivided = judge.predict(plain)
    for shard in ("zero1", "zero2", "zero3"):
        divided = judge.predict(replace(plain, shard=shard))
        for own, other in zip(undivided.memory, divided.memory, strict=True):
            assert other.planned == pytest.approx(own.planned, rel=1e-9)
            assert other.gradients + other.communication == pytest.approx(own.gradients, rel=1e-9)


@pytest.mark.parametrize(
    ("memory_gib", "sent_bytes"), [(8, 0), *exhaustive((8, 1e6)), (8, 1e8), (0.4, 1e6), *exhaustive((0.35, 1e6))]
)
def test_the_best_of_all_numbers_of_copies(memory_gib: float, sent_bytes: float) -> None:
    profiles = mixtures(memory_gib, sent_bytes)
    whole, shared = profiles[ALONE], {key: own for key, own in profiles.items() if key != ALONE}
    alone = {}
    for n in (1, *NUMBERS):
        job = make_job(layers=4, parallel={"auto": True, "experts": n})
        with suppress(SpecError):  # too large
            alone[n] = choose(job, whole, search_s=0, shared=shared).best
    result = choose(make_job(layers=4, parallel="auto"), whole, search_s=0, shared=shared)
    assert result.best.step_s <= min(p.step_s for p in alone.values()) * 1.005 + 1e-12  # NEAR: a simpler one
    assert all(p.candidate.experts == n and not p.candidate.replicas % n for n, p in alone.items())
    assert all(p.candidate.update == "wait" for n, p in alone.items() if n > 1)


@pytest.mark.parametrize("experts", [2, "auto"])
def test_copies_with_the_same_experts_divide_these_again_where_nothing_else_fits(experts: int | str) -> None:
    """Thirty times as many parameters: of 2 GiB a device, halves of the experts alone take more."""

    def heavy(profile: Profile) -> Profile:
        more = ("parameters", "expert_parameters")
        layers = (x.model_copy(update={name: 30 * getattr(x, name) for name in more}) for x in profile.layers)
        return profile.model_copy(update={"layers": tuple(layers)})

    profiles = mixtures(2, 1e6)
    halves = {Sharing(experts=2): heavy(profiles[Sharing(experts=2)])}
    job = make_job(layers=4, parallel={"auto": True, "stages": 1, "experts": experts})
    judge, grid = Predictor(halves[Sharing(experts=2)], job.train, 6), Grid(1, 4, 1, 2, experts=2)
    assert judge.room_on(grid, again=1) < 0 < judge.room_on(grid)
    best = choose(job, heavy(profiles[ALONE]), search_s=0, shared=halves).best
    assert (best.candidate.experts, best.candidate.shard) == (2, "zero3")


def test_tokens_that_cost_nothing_are_sent_and_dear_ones_are_not() -> None:
    def chosen(sent_bytes: float) -> Any:
        profiles = mixtures(8, sent_bytes)
        return choose(make_job(layers=4), profiles.pop(ALONE), search_s=0, shared=profiles)

    cheap, dear = chosen(0), chosen(1e9)
    assert cheap.best.candidate.experts == 4
    assert "4 copies divide experts" in cheap.rows[0].why
    assert cheap.plan.parallel.experts == 4
    assert json.loads(json.dumps(as_json(cheap)))["candidates"][0]["experts"] == 4
    assert dear.best.candidate.experts == 1


def measured(memory_gib: float, loads: tuple[float, ...] = (), compiled: bool = False) -> Profile:
    """The model of ``mixtures`` as it is measured, of which the profile says what belongs to its four experts."""
    whole = make_profile(layers=4, devices=4, memory_bytes=memory_gib * 2**30)
    own = whole.layers[1].parameters * 3 // 4
    work = ExpertsWork(experts=4, per_token=1, rows=128, row_bytes=64.0, parameters=own, kept=0.5)
    experts = ExpertsProfile(work=work, forward=0.8, input_grad=0.8, weight_grad=0.8, loads=loads)
    layers = [layer.model_copy(update={"experts": experts}) for layer in whole.layers[1:-1]]
    taken_for = TakenFor(model={}, optimizer="adamw", compiled=True) if compiled else None
    return whole.model_copy(update={"layers": (whole.layers[0], *layers, whole.layers[-1]), "taken_for": taken_for})


def test_measured_costs_are_divided_by_the_measured_loads() -> None:
    job, uneven = make_job(layers=4), (2.0, 1.0, 0.5, 0.5)
    even, skewed = (measured_with_experts(job, measured(8, loads), 4) for loads in ((), uneven))
    assert set(even) == set(skewed) == {Sharing(experts=n) for n in NUMBERS}
    for n, busiest in (
        (2, 1.25),
        (4, 2.0),
    ):  # 2 and 0.5 against 1 and 0.5: the order in which copies hold them is chosen
        a, b = even[Sharing(experts=n)].layers[1], skewed[Sharing(experts=n)].layers[1]
        assert b.exchanged_bytes == pytest.approx(busiest * a.exchanged_bytes)
        assert b.kept_bytes == pytest.approx((1 + (busiest - 1) * 0.5) * a.kept_bytes)
        assert b.times[1].forward == pytest.approx((1 + (busiest - 1) * 0.8) * a.times[1].forward)
    given = make_job(layers=4, parallel={"auto": True, "imbalance": 1.0, "experts": 2})
    (said,) = measured_with_experts(given, measured(8, uneven), 4).values()
    assert said.layers == even[Sharing(experts=2)].layers  # a job's own number comes first
    assert measured_with_experts(job, measured(8, uneven, compiled=True), 4) == {}


def test_a_measured_model_that_fits_no_device_divides_its_experts() -> None:
    whole = {"auto": True, "stages": 1, "shard": "none"}
    with pytest.raises(SpecError, match="no plan fits"):
        choose(make_job(layers=4, parallel={**whole, "experts": 1}), measured(0.4), search_s=0)
    best = choose(make_job(layers=4, parallel=whole), measured(0.4), search_s=0).best
    assert best.candidate.experts > 1
    assert best.fits


def test_a_number_without_costs_of_its_own_has_those_of_whole_experts() -> None:
    result = choose(make_job(layers=4, parallel={"auto": True, "experts": 2}), make_profile(layers=4), search_s=0)
    assert result.best.candidate.experts == 2
    assert result.best.candidate.replicas % 2 == 0


def test_auto_is_left_to_the_planner() -> None:
    spec = ParallelSpec.model_validate({"experts": "auto", "stages": 2, "schedule": "1f1b", "microbatch": 1})
    assert spec.auto
    assert "experts" not in spec.given


def test_imbalance_is_no_key_of_a_whole_plan() -> None:
    with pytest.raises(SpecError, match=r"parallel\.imbalance: is read by the planner alone"):
        make_job(parallel={"stages": 2, "schedule": "1f1b", "microbatch": 1, "imbalance": 1.5})
    assert make_job(parallel={"auto": True, "imbalance": 1.5}).parallel.imbalance == 1.5


@pytest.mark.parametrize("sent_bytes", [1e6, 1e8])
def test_bounds_count_the_way_of_tokens(sent_bytes: float) -> None:
    """No plan is faster than its bounds, and those of divided experts grow with what is sent."""
    train = make_job(layers=4).train
    least: dict[float, list[float]] = {}
    for sent in (0.0, sent_bytes):
        profiles = mixtures(8, sent)
        judge = Judges({key: Predictor(own, train, 4) for key, own in profiles.items()})
        every = [g for sharing in profiles for g in grids(4, train.batch, 4, 1, 16, *sharing)]
        for grid in every:
            own = judge.of(grid)
            for c in (c for c in own.on(grid) if c.form.versions == "flush"):
                p = own.predict(c)
                least.setdefault(sent, []).append(own.least_on(grid))
                assert max(own.least_on(grid), own.least_of_all(c), own.least(c)) <= p.step_s, c
    more = [b / a for a, b in zip(*least.values(), strict=True)]
    assert min(more) >= 1
    assert max(more) > 1.01
