"""An encoder before a language model: the planner's own plans are as fast as its stages in every device's gaps."""

from __future__ import annotations

import pytest

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes
from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import choice_of
from raypipe.plan.choose import choose
from raypipe.plan.tensor_groups import ALONE
from raypipe.schedule import generate
from raypipe.schedule.ir import Rules
from raypipe.schedule.passes import without_frozen
from raypipe.schedule.shape import Grid, Shape
from raypipe.search import search
from raypipe.search.placements import placed
from tests.exhaustive import exhaustive
from tests.plan.conftest import make_job

MICROBATCHES, LAYERS, SEARCH_S = 16, 6, 2.0
"""Layers of each device's part of the encoder and of what reads it."""


def profile_of(share: float, trained: bool, devices: int) -> Profile:
    """An encoder with a share of all forwards; weights with their state take as much as four micro-batches."""

    def layer(name: str, part: float, on: bool) -> LayerProfile:
        once = part / devices / LAYERS
        times = TaskTimes(forward=once, input_grad=once, weight_grad=once, joint=2 * once, recompute=once)
        return LayerProfile(
            name=name, parameters=250_000, trained_parameters=None if on else 0, kept_bytes=1e6, output_bytes=1e6,
            times={1: times},
        )  # fmt: skip

    hop = LinkFit(alpha_s=0.0, beta_s_per_byte=1e-9)
    parts = (("encoder", share, trained), ("model", 1 - share, True))
    layers = [layer(f"{name}.{i}", part, on) for name, part, on in parts for i in range(devices * LAYERS)]
    return Profile(
        source="measured", device="made up", dtype="float32", devices=devices, devices_per_host=devices,
        memory_bytes=1e15, layers=tuple(layers), update_s_per_parameter=1e-15, inside=hop, between=hop,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "trained", "devices"),
    [(0.3, False, 4), *exhaustive((0.15, False, 8), (0.3, False, 8), (0.15, True, 8), (0.3, True, 8))],
)
def test_auto_is_as_fast_in_no_more_memory(share: float, trained: bool, devices: int) -> None:
    profile = profile_of(share, trained, devices)
    wish = {"auto": True, "stages": devices, "replicas": 1, "microbatch": 1}
    job = make_job(layers=len(profile.layers) - 2, batch=MICROBATCHES, parallel=wish)
    judge, grid = choice_of(job, profile, devices).judge.by[ALONE], Grid(devices, 1, 1, MICROBATCHES)
    placement = placed("encoder", Shape(devices=devices, microbatches=MICROBATCHES))
    cut = tuple(range(i * LAYERS, (i + 1) * LAYERS) for i in range(2 * devices))
    c = Candidate.on(grid, "auto", placement="encoder")
    rules = Rules(frozen=judge.frozen(cut))
    order = search(placement, MICROBATCHES, judge.costs_of(c, cut, placement, True), rules=rules, budget_s=SEARCH_S)
    gaps = judge.predict_order(c, order.schedule, cut)
    in_first = (range((devices + 1) * LAYERS), *cut[devices + 1 :])
    named = generate("1f1b", Shape(devices=devices, microbatches=MICROBATCHES))
    first = judge.predict_order(Candidate.on(grid, "1f1b"), without_frozen(named, judge.frozen(in_first)), in_first)
    as_much = profile.model_copy(update={"memory_bytes": 1.001 * max(gaps.memory_bytes)})
    best = choose(job, as_much, devices, search_s=SEARCH_S).best
    assert best.step_s <= gaps.step_s * 1.005
    assert first.step_s >= 1.2 * best.step_s
