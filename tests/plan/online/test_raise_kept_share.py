"""The share of layers that keep their activations rises up to the memory cap: on devices made up, and on real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import alphas, recomputed_after
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.plan.online.controller import MeasuredStep, StepMemory
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.sequence import Raiser, levels
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.simulate.period import period
from tests.runtime.runs.small_runs import drive, small_job

MB = 2**20
CUT = tuple(tuple(range(6 * s, 6 * s + 6)) for s in range(8))
LAYER = 3 * MB


def raiser(cap_mb: float) -> Raiser:
    parallel = ParallelSpec(
        schedule="shifted-critical-path", stages=8, recompute="stage-aware", memory_cap_mb=cap_mb
    )  # fmt: skip
    return Raiser(Plan.of(parallel, CUT, 16), 16, clips=False)


def devices(search: Raiser, level: int, more: float = 1.0) -> list[StepMemory]:
    """100 MiB, the layers of the micro-batch that goes back, and those that the others in flight keep."""
    recomputed = recomputed_after(CUT, alphas(8, search.levels[level]))
    result = []
    for s, layers in enumerate(CUT):
        remade = sum(i in recomputed for i in layers)
        kept = (search.flight[s, s] - 1) * (len(layers) - remade) * LAYER * more
        result.append(StepMemory(round(100 * MB + 6 * LAYER + kept), {s: remade * LAYER} if remade else {}))
    return result


def costs(search: Raiser) -> CostTable:
    """A layer takes 1/6; R as many as are computed again."""
    recomputed = recomputed_after(CUT, alphas(8, search.levels[search.at]))
    return replace(CostTable.even(8), recompute=tuple(sum(i in recomputed for i in layers) / 6 for layers in CUT))


def step_seconds(search: Raiser) -> float:
    return period(build_schedule(search._plan(search.at), 16), costs(search))


def settle(search: Raiser, more: float = 1.0) -> list[int]:
    """Run until it has decided; returns the levels that ran."""
    ran = [0]
    for _ in range(400):
        before = search.at
        clock = cast("StepClock", SimpleNamespace(so_far=lambda: costs(search)))
        search.observe(MeasuredStep(step_seconds(search), devices(search, before, more), clock))
        measures = search.measures_memory
        if search.next_plan() is not None and search.at != before:
            ran.append(search.at)
        if search.done:
            assert not measures, "what it offers last is to run without measuring"
            return ran
    raise AssertionError("never decides")


@pytest.mark.parametrize("cap_mb", [118.5, 130, 150, 200, 230, 1000])
def test_the_largest_share_that_fits(cap_mb) -> None:
    search = raiser(cap_mb)
    ran = settle(search)
    fitting = [k for k in range(len(search.levels)) if max(d.peak for d in devices(search, k)) <= cap_mb * MB]
    assert search.at == search.good == max(fitting)
    assert len(ran) <= 2, "what memory is needed follows from the first measurement"


def test_time_saved_is_predicted_and_held_against_the_steps() -> None:
    """Memory decides alone, so every share is followed by what it really saved."""
    search = raiser(150)
    settle(search)
    first, *rest = (event.fields for event in search.drain())
    assert "realised_gain" not in first
    assert first["next_gain"] > 0.01
    assert rest[0]["predicted_gain"] == first["next_gain"]
    assert rest[0]["realised_gain"] == pytest.approx(first["next_gain"])
    assert rest[0]["step_s"] < first["step_s"]


def test_it_backs_off_where_more_is_needed_than_expected() -> None:
    search = raiser(200)
    settle(search, more=1.7)
    peaks = [max(d.peak for d in devices(search, k, 1.7)) for k in range(len(search.levels))]
    assert peaks[search.at] <= 200 * MB < peaks[search.at + 1]


def test_a_cap_below_full_recomputation_keeps_nothing() -> None:
    search = raiser(90)
    assert settle(search) == [0]
    assert search.drain()[-1].fields["fits"] is False


def test_levels_add_layers() -> None:
    kept = [sum(map(len, CUT)) - len(recomputed_after(CUT, alphas(8, share))) for share in levels(CUT)]
    assert kept == sorted(set(kept))
    assert kept[0] == 6
    assert kept[-1] == 48
    assert levels([(0, 1), (2, 3)]) == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.runs
def test_a_run_finds_its_share(stage_pool, text_folder, tmp_path) -> None:
    """Every layer with a cap without effect; with one that is too low for that, fewer: the same losses to the bit."""
    model = {"layers": 6, "hidden": 64, "sequence": 64}

    def run(name: str, **parallel: object):
        keys = {"schedule": "1f1b", "stages": 2, **parallel}
        return drive(small_job(text_folder, keys, model, steps=20, batch=8), stage_pool, tmp_path / name)

    def decisions(name: str) -> list[dict]:
        return [e for e in read_rows(tmp_path / name / EVENTS) if e["event"] == "recompute"]

    free = run("free", recompute="stage-aware", memory_cap_mb=1e6)
    first, last = decisions("free")[0], decisions("free")[-1]
    assert (first["alpha"], last["alpha"], last["fits"]) == (0.0, pytest.approx(1.0), True)
    assert last["peak_mb"] > first["peak_mb"]
    between = 0.5 * (first["peak_mb"] + last["peak_mb"])
    tight = run("tight", recompute="stage-aware", memory_cap_mb=between)
    settled = [e for e in decisions("tight") if e["fits"]][-1]
    assert 0 < settled["alpha"] < 0.99
    assert settled["peak_mb"] <= between
    plan = json.loads((tmp_path / "tight" / "plan.json").read_text())
    assert plan["parallel"]["alphas"] == pytest.approx(settled["alpha"])
    fixed = run("fixed", recompute="stage-aware", alphas=0.0)
    assert free.losses == tight.losses == fixed.losses  # a plain loop's: test_exactness.py has such a plan
