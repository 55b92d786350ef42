"""The search finds what timing every candidate finds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.best_first import FIRST, NEAR, _Search, best_first, largest_microbatch, rank_key, simplest
from raypipe.plan.candidate import Candidate, grids
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import ALONE, Judges, Sharing
from raypipe.plan.watch import ENDLESS
from raypipe.schedule import SCHEDULES
from raypipe.schedule.shape import Grid
from tests.exhaustive import exhaustive
from tests.plan.conftest import make_job, make_profile, make_shared

CASES = [
    {"layers": 4, "devices": 3, "batch": 6, "seed": 1, "alone": 0.7},
    {"layers": 6, "devices": 4, "batch": 8, "seed": 2},
    {"layers": 6, "devices": 4, "batch": 8, "seed": 3, "clip": 1.0},
    {"layers": 4, "devices": 4, "batch": 4, "seed": 4, "memory_bytes": 0.42 * 2**30},
    {"layers": 6, "devices": 4, "batch": 8, "seed": 5, "clip": 1.0, "memory_bytes": 0.6 * 2**30},
    {"layers": 3, "devices": 4, "batch": 4, "seed": 6, "clip": 1.0, "memory_bytes": 0.36 * 2**30, "tensor": 2},
    {"layers": 4, "devices": 4, "batch": 8, "seed": 7, "tensor": 2},
]


SOME = [case if case["seed"] in (1, 4, 6) else exhaustive(case)[0] for case in CASES]
"""Every day one that is roomy, one with little memory, and one with all at once."""


def flushing(c: Candidate) -> Candidate | None:
    return c if c.form.versions == "flush" else None


def setting(
    layers: int, devices: int, batch: int, seed: int, tensor: int = 1, divides: bool = False, **more: object
) -> tuple[Judges, list[Grid]]:
    """The judges and the grids of a case; with ``tensor`` also those of groups, with and without halves."""
    train = make_job(layers, batch, **{key: more.pop(key) for key in ("clip", "optimizer") if key in more}).train
    profile = make_profile(layers, devices, seed, **more)
    if train.optimizer == "muon":  # of each block two matrices, of which copies may have whole ones
        blocks = [one.model_copy(update={"matrices": ((1500, 1000), (400, 1000))}) for one in profile.layers[1:-1]]
        profile = profile.model_copy(update={"layers": (profile.layers[0], *blocks, profile.layers[-1])})
    profiles = {ALONE: profile}
    if tensor > 1:
        profiles |= {Sharing(tensor, halves): make_shared(profile, tensor, halves) for halves in (False, True)}
    every = [g for sharing in profiles for g in grids(devices, batch, layers, 1, 16, *sharing)]
    return Judges({k: Predictor(own, train, layers, divides=divides) for k, own in profiles.items()}), every


KNOWN: dict[int, list[Prediction]] = {}


def everything_of(case: dict[str, int]) -> list[Prediction]:
    """``everything`` of a case, worked out once."""
    if case["seed"] not in KNOWN:
        KNOWN[case["seed"]] = everything(*setting(**case))
    return KNOWN[case["seed"]]


def everything(judge: Judges, every: list[Grid]) -> list[Prediction]:
    """Every candidate timed; of those that do not fit, all that may hold less, relief or not."""
    result: list[Prediction] = []
    for grid in every:
        for c in filter(None, map(flushing, judge.of(grid).on(grid))):
            for todo in ([c], leaner(c, judge.of(c).train.clip is not None)):
                fitting = [p for one in todo if (p := predicted(judge, one)) is not None and p.fits]
                result += fitting
                if fitting:
                    break
    return result


def recut(judge: Judges, p: Prediction) -> Prediction | None:
    """The same plan with balanced devices."""
    other = judge.of(p.candidate).recut(p.candidate)
    return None if other is None else predicted(judge, other)


def predicted(judge: Judges, c: Candidate) -> Prediction | None:
    try:
        return judge.of(c).predict(c)
    except ScheduleError:  # a limit that the family cannot keep
        return None


def leaner(c: Candidate, clips: bool) -> list[Candidate]:
    """Every combination of what takes memory from a candidate and time with it."""
    recomputed = ["none"] if c.form.recomputes else ["none", "microbatches"] + ["layers"] * (not c.sub_pipelined)
    told = "memory_limit" in SCHEDULES[c.schedule].options and c.unit is None
    limits = [None, 3.0, 4.0, 5.0] if told else [None]
    updates = [c.update, "wait"] if clips and c.update == "auto" else [c.update]
    return [
        replace(c, recompute=r, update=u, memory_limit=limit)  # type: ignore[arg-type]
        for r in recomputed for u in updates for limit in limits if (r, u, limit) != ("none", c.update, None)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME, ids=lambda c: f"seed {c['seed']}")
def test_nothing_better_is_missed(case) -> None:
    judge, every = setting(**case)
    all_of_them = sorted(everything_of(case), key=rank_key)
    assert len(all_of_them) > 40
    if "tensor" in case:  # and groups are worth a place among them
        assert {p.candidate.tensor for p in all_of_them[:12]} == {1, 2}
    result = best_first(judge, every, 12, flushing)
    best = [p.step_s for p in result.best]
    expected: list[float] = []
    for p in all_of_them:  # plans that do the same under two names count once
        if not any(abs(p.step_s / t - 1) < 1e-5 for t in expected):
            expected.append(p.step_s)
    distinct = [t for i, t in enumerate(best) if not any(abs(t / u - 1) < 1e-5 for u in best[:i])]
    cut_for_devices = [q for p in all_of_them if (q := recut(judge, p)) is not None and q.fits]
    if cut_for_devices:
        assert all(t <= e * (1 + 1e-6) for t, e in zip(distinct, expected, strict=False))
    else:
        assert distinct == pytest.approx(expected[: len(distinct)], rel=1e-6)
    assert result.best[0].candidate == min([*all_of_them, *cut_for_devices], key=rank_key).candidate
    assert result.timed < len(all_of_them)
    assert all(p.fits for p in result.best)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], *exhaustive(CASES[1], CASES[6])], ids=lambda c: f"seed {c['seed']}")
@pytest.mark.parametrize("near", [NEAR, 0.1])
def test_nothing_simpler_that_is_about_as_fast_is_missed(case, near) -> None:
    judge, every = setting(**case)
    for top in (1, 4):
        result = best_first(judge, every, top, flushing, near)
        balanced = everything_of(case)
        both = [*balanced, *(q for p in balanced if (q := recut(judge, p)) is not None and q.fits)]
        chosen, expected = simplest(result.best + result.near, near), simplest(both, near)
        assert (chosen.plainness, chosen.step_s) == (expected.plainness, pytest.approx(expected.step_s, rel=1e-5))
        fastest = min(p.step_s for p in both)
        assert chosen.step_s <= fastest * (1 + near)
        assert all(p.step_s <= fastest * (1 + near) for p in result.near)


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME, ids=lambda c: f"seed {c['seed']}")
def test_every_bound_holds(case) -> None:
    judge, every = setting(**case)
    for p in everything_of(case):
        if p.candidate.recompute == "none":
            assert judge.of(p.candidate).least(p.candidate) <= p.step_s
            other = recut(judge, p)
            if other is not None:
                assert judge.of(other.candidate).least(other.candidate) <= other.step_s
        assert judge.of(p.candidate.grid).least_on(p.candidate.grid) <= p.step_s * (1 + 1e-12)
        if p.candidate.schedule == FIRST and p.candidate.slices == 1:
            assert judge.of(p.candidate).least_uncut(p.candidate) <= p.step_s * (1 + 1e-12)
    for grid in every:
        for c in judge.of(grid).on(grid):
            if flushing(c) is None:
                continue
            try:
                p = judge.of(c).predict(c)
            except ScheduleError:
                continue
            told = judge.of(c).outright(c)
            if told:  # all that would relieve it where its memory is known exactly
                assert {other for _, other in told} >= {other for _, other in judge.of(p.candidate).oom_fallback(p)}
            for least, other in [*(told or []), *judge.of(p.candidate).oom_fallback(p)]:
                with suppress(ScheduleError):  # a limit that the family cannot keep
                    relieved = judge.of(other).predict(other, timed=True)
                    assert least <= relieved.step_s or not relieved.fits
                    assert not (told == [] and relieved.fits)
            assert not (told is not None and p.fits)


def test_weights_that_do_not_fit_are_known_without_an_order() -> None:
    """Many pipelines hold many copies of the weights; recomputation changes nothing about that."""
    judge, every = setting(6, 8, 8, 5, memory_bytes=0.3 * 2**30)
    made = filter(None, (flushing(c) for g in every for c in judge.of(g).on(g)))
    told = [c for c in made if judge.of(c).outright(c) == []]
    assert {c.schedule for c in told} >= {"1f1b", "gems", "chimera"}
    for c in told[:: max(1, len(told) // 60)]:
        with suppress(ScheduleError):
            assert not judge.of(c).predict(c).fits
            assert not judge.of(c).holds(replace(c, recompute="full"))


@pytest.mark.slow
def test_fewer_activations_and_recomputation_are_tried_together() -> None:
    judge, every = setting(4, 2, 4, 8, memory_bytes=0.28 * 2**30)
    result, expected = best_first(judge, every, 12, flushing).best, sorted(everything(judge, every), key=rank_key)
    both = [*expected, *(q for p in expected if (q := recut(judge, p)) is not None and q.fits)]
    assert result[0].step_s == pytest.approx(min(p.step_s for p in both), rel=1e-6)
    assert all(p.step_s <= e.step_s * (1 + 1e-6) for p, e in zip(result, expected, strict=False))
    assert any(p.candidate.memory_limit is not None and p.candidate.recompute != "none" for p in result)


@pytest.mark.slow
def test_more_devices_more_memory_and_faster_links_are_never_worse() -> None:
    def best(**changes: object) -> float:
        return best_first(*setting(6, 4, 8, 7, **changes), 1, flushing).best[0].step_s

    base = best(memory_bytes=0.6 * 2**30)
    assert best(memory_bytes=8 * 2**30) <= base
    fast = make_profile().inside
    assert best(memory_bytes=0.6 * 2**30, between=fast) <= base
    steps = []
    for devices in (1, 2, 3, 4, 6, 8):
        steps.append(best_first(*setting(6, devices, 8, 7), 1, flushing).best[0].step_s)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 3


@pytest.mark.slow
def test_the_rule_of_the_largest_micro_batch() -> None:
    judge, every = setting(6, 4, 16, 2)
    greedy = largest_microbatch(judge, every, 50, flushing).best
    largest: dict[object, Prediction] = {}
    for p in everything(judge, every):
        c = p.candidate
        kind = (c.stages, c.replicas, c.schedule, c.chunks, c.concat)
        plain = c.recompute == "none" and c.memory_limit is None and c.unit in (None, c.microbatches)
        more = c.concat == "direct" or c.microbatches > c.stages
        if c.pipelines == 2 and plain and more and c.microbatches >= c.stages:
            largest[kind] = max(largest.get(kind, p), p, key=lambda q: q.candidate.microbatch)
    for p in greedy:
        c = p.candidate
        same = largest[c.stages, c.replicas, c.schedule, c.chunks, c.concat]
        assert c == replace(same.candidate, sync=c.sync, balance=c.balance)
        assert p.step_s <= same.step_s * (1 + 1e-6)
        assert c.balance == "stages" or p.step_s < same.step_s
    expected = sorted(p.step_s for p in largest.values())[: len(greedy)]
    assert all(p.step_s <= t * (1 + 1e-6) for p, t in zip(greedy, expected, strict=True))
    best = best_first(judge, every, 1, flushing).best[0]
    assert best.step_s <= greedy[0].step_s


@pytest.mark.slow
def test_the_rule_recomputes_all_or_nothing_and_only_where_it_must() -> None:
    judge, every = setting(6, 4, 16, 2, memory_bytes=0.42 * 2**30)
    judge.by[ALONE].recompute = ("full",)
    greedy = largest_microbatch(judge, every, 50, flushing).best
    recomputed = [p for p in greedy if p.candidate.recompute != "none"]
    assert recomputed
    assert len(recomputed) < len(greedy)
    for p in recomputed:
        assert not any(p.keep or ())
        for g in every:  # no micro-batch would have fitted without
            c = p.candidate
            if (g.stages, g.replicas) == (c.stages, c.replicas) and g.microbatches >= g.stages:
                assert not judge.of(c).holds(
                    replace(c, recompute="none", microbatch=g.microbatch, microbatches=g.microbatches)
                )


def test_equal_plans_are_told_apart_in_the_same_way_every_time() -> None:
    judge, every = setting(6, 4, 8, 2)
    recomputed, _ = setting(6, 4, 8, 2)
    first = [p.candidate for p in best_first(judge, every, 20, flushing).best]
    assert first == [p.candidate for p in best_first(recomputed, every[::-1], 20, flushing).best]


class Tight:
    """A judge of candidates of which none fits without recomputation, in the order of their micro-batches."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str]] = []

    def of(self, c: Candidate) -> Tight:
        return self

    def least(self, c: Candidate) -> float:
        return float(c.microbatch) if c.recompute == "none" else 10.0

    least_of_all = least_kept = least

    def unordered(self, c: Candidate) -> None:
        return None

    outright = unordered

    def predict(self, c: Candidate) -> Prediction:
        self.asked.append((c.experts, c.microbatch, c.recompute))
        fits = c.recompute != "none"
        made = SimpleNamespace(candidate=c, fits=fits, step_s=20.0 - c.microbatch, memory_bytes=(1,), plainness=(1,))
        return cast(Prediction, made)

    def oom_fallback(self, p: Prediction) -> list[tuple[float, Candidate]]:
        return [(10.0, replace(p.candidate, recompute="microbatches"))]


def test_each_way_to_share_has_its_first_plan_at_once() -> None:
    """Bounds alone would put the plan of two ranks that divide experts behind all candidates that do not fit."""
    judge = Tight()
    made = [(1, 1), (1, 3), (2, 2), (2, 4), (2, 6)]
    search = _Search(cast(Judges, judge), 1, lambda c: c)
    for experts, b in made:
        grid = Grid(2, 2, b, 4, experts=experts)
        search.push(float(b), Candidate.on(grid, "1f1b"))
    search.run(ENDLESS, [])
    first = judge.asked.index((2, 2, "none"))
    assert judge.asked[first + 1] == (2, 2, "microbatches")
    after = [one for one in judge.asked if one[2] == "microbatches" and one[1] > 2]
    assert judge.asked[-len(after) :] == after  # what else recomputes waits for its turn
    assert search.fastest == 14
