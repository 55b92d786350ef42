"""Which devices are neighbours, as the planner searches it: against every candidate of both ways, and as a job asks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest

from raypipe.cost.profile import LinkFit
from raypipe.errors import ScheduleError
from raypipe.plan.best_first import best_first
from raypipe.plan.candidate import Candidate
from raypipe.plan.choose import choose
from raypipe.plan.decision_json import as_json
from raypipe.plan.plan import Plan, build_schedule
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid, Innermost
from tests.plan.conftest import make_job, make_profile
from tests.plan.test_best_first import flushing, setting

FAST = LinkFit(alpha_s=2e-5, beta_s_per_byte=1 / 16e9)
ETHERNET = LinkFit(alpha_s=3e-4, beta_s_per_byte=1 / 0.4e9)
"""Sums between hosts cost more over it than the activations of these micro-batches."""


def profile_of(devices: int = 4, layers: int = 4) -> Any:
    """Two hosts with slow links between them, and activations of a tenth of the usual size."""
    profile = make_profile(
        layers=layers, devices=devices, devices_per_host=devices // 2, inside=FAST, between=ETHERNET,
        update_s_per_parameter=2e-10,
    )  # fmt: skip
    small = tuple(layer.model_copy(update={"output_bytes": layer.output_bytes / 10}) for layer in profile.layers)
    return profile.model_copy(update={"layers": small})


def chosen(parallel: Any) -> Any:
    return choose(make_job(layers=4, batch=8, parallel=parallel), profile_of(), search_s=0)


@pytest.mark.slow
def test_stages_are_on_different_hosts_where_sums_cost_more_than_activations() -> None:
    shape = {"auto": True, "stages": 2, "replicas": 2, "shard": "none"}
    result = {way: chosen({**shape, "innermost": way}) for way in get_args(Innermost)}
    best = chosen(shape)
    assert best.best.candidate.innermost == "replicas"
    assert best.plan == result["replicas"].plan
    assert best.best.step_s < result["stages"].best.step_s * 0.98
    assert "stages on different hosts, each stage's copies inside one" in best.rows[0].why
    for way, decision in result.items():
        rows = [row.prediction.candidate for row in decision.rows if row.prediction.candidate.stages > 1]
        assert {c.innermost for c in rows} == {way}
        assert as_json(decision)["candidates"][0]["innermost"] == way
    one = Plan.model_validate_json(best.plan.text())
    other = one.remade(8, innermost="stages")
    assert one.numbering().by_rank() == [0, 2, 1, 3]
    assert other.numbering().by_rank() == [0, 1, 2, 3]
    assert build_schedule(one, 8) == build_schedule(other, 8)  # it says where ranks are, not what they do


@pytest.mark.slow
@pytest.mark.parametrize("divides", [False, True])
def test_no_candidate_of_either_way_is_faster(divides: bool) -> None:
    judge, every = setting(layers=4, devices=4, batch=8, seed=5, devices_per_host=2, between=ETHERNET, divides=divides)
    result = best_first(judge, every, 1, flushing).best[0]
    ways = set()
    for grid in every:
        for made in judge.of(grid).on(grid):
            for c in (made, *(judge.of(made).shard_ways(made) if divides and made.shard == "none" else ())):
                if flushing(c) is not None:
                    ways.add((c.innermost, c.stages > 1 < c.replicas))
                    with suppress(ScheduleError):
                        p = judge.of(c).predict(c)
                        assert judge.of(c).least(c) <= p.step_s * (1 + 1e-9)
                        assert not p.fits or divides or p.step_s >= result.step_s * (1 - 1e-6), c
    assert ways == {("stages", False), ("stages", True), ("replicas", True)}


@pytest.mark.parametrize(("devices_per_host", "devices", "both"), [(2, 4, True), (1, 4, False), (4, 4, False)])
def test_both_ways_are_tried_only_where_they_differ(devices_per_host: int, devices: int, both: bool) -> None:
    job = make_job()
    profile = make_profile(devices=devices, devices_per_host=devices_per_host)
    judge = Predictor(profile, job.train, 6)
    result = {c.innermost for c in judge.on(Grid(stages=2, replicas=2, microbatch=1, microbatches=4))}
    assert result == ({"stages", "replicas"} if both else {"stages"})
    assert {c.innermost for c in judge.on(Grid(stages=4, replicas=1, microbatch=1, microbatches=8))} == {"stages"}


def test_shard_groups_of_one_host_are_those_of_its_copies() -> None:
    judge = Predictor(profile_of(devices=8), make_job().train, 4)
    c = Candidate.on(Grid(stages=2, replicas=4, microbatch=1, microbatches=2), "1f1b")
    groups = {
        way: {shard_way.shard_group for shard_way in judge.shard_ways(replace(c, innermost=way))}
        for way in get_args(Innermost)
    }
    assert groups == {"stages": {2, 4}, "replicas": {4}}
    inside = judge.costs(replace(c, innermost="replicas", shard="zero3", update="wait"))
    between = judge.costs(replace(c, shard="zero3", update="wait"))
    assert sum(inside.gather) < sum(between.gather) / 5
    assert inside.links[0] > between.links[0]
