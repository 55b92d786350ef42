"""Decisions: what wins, what is said of the losers, and what is said when nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.job import load_cluster, load_job
from raypipe.partition.job_costs import job_profile
from raypipe.plan.best_first import NEAR
from raypipe.plan.choice import choice_of
from raypipe.plan.choose import Decision, choose, label, look_for_first
from raypipe.plan.decision_json import as_json
from raypipe.plan.plan import Plan, build_schedule
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.remedies import device_gib
from raypipe.plan.tensor_groups import ALONE, Sharing
from raypipe.plan.watch import Watch
from raypipe.schedule import SCHEDULES
from raypipe.schedule.live_activations import peak_activations
from raypipe.search.budget import Budget
from raypipe.simulate.engine import simulate
from tests.bench.search.exhaustive import every, small
from tests.exhaustive import exhaustive
from tests.plan.conftest import MIB, make_job, make_profile, make_shared

GIB = 2**30
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16-true"])
def test_a_choice_says_that_autocast_leaves_experts_in_float32(dtype: str) -> None:
    profile = make_profile(1, 1, dtype=dtype)
    layers = [layer.model_copy(update={"expert_parameters": layer.parameters // 2}) for layer in profile.layers]
    for one, has in ((profile, False), (profile.model_copy(update={"layers": tuple(layers)}), dtype == "bfloat16")):
        notes = choose(make_job(1, 2, dtype=dtype), one, search_s=0).notes
        assert any(note.startswith("Experts compute in float32") for note in notes) == has


@pytest.mark.slow
def test_every_family_has_a_row_that_says_why_it_lost() -> None:
    decision = choose(make_job(), make_profile(), search_s=0)
    kinds = {label(row.prediction.candidate) for row in decision.rows}
    unpaired = {n for n, family in SCHEDULES.items() if n != "dapple" and not family.paired}
    assert kinds >= unpaired | {"single device", "data parallel"}
    assert decision.rows[0].why.startswith("fastest")
    assert [row.group for row in decision.rows[:11]] == ["ranked"] * 10 + ["compared"]
    assert any("Below the first 10" in note for note in decision.notes)
    assert any("not measured" in note for note in decision.notes)  # T, of a measured profile
    described = choose(make_job(), make_profile(source="analytic"), search_s=0, top=10)
    assert not any("T = 1" in note for note in described.notes)
    assert all(row.why for row in decision.rows)
    fitting = [row.prediction.step_s for row in decision.rows[:10]]
    assert fitting[1:] == sorted(fitting[1:])
    assert fitting[0] <= fitting[1] * (1 + NEAR)
    stale = [row for row in decision.rows if row.prediction.form.versions != "flush"]
    assert {row.prediction.candidate.schedule for row in stale} == {"pipedream", "pipedream-2bw"}
    assert all("--allow asynchronous" in row.why for row in stale)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [32, *exhaustive(16, 24, 35, 45, 47)])
def test_no_candidate_that_fits_is_shorter_by_more_than_a_per_cent(seed: int) -> None:
    """Cases in which copies of the whole model in several stages that divide optimizer state alone were not tried."""
    case = small(seed)
    chosen = choose(case.job, case.profile, search_s=0, top=1, shared=case.shared).best
    assert chosen.step_s <= 1.01 * min(p.step_s for p in every(case))


@pytest.mark.slow
def test_asynchronous_schedules_win_only_where_they_are_allowed() -> None:
    job, profile = make_job(layers=4, batch=32), make_profile(layers=4, devices=4, seed=3)
    synchronous = choose(job, profile, search_s=0)
    stale = choose(job, profile, search_s=0, asynchronous=True)
    assert synchronous.best.form.versions == "flush"
    assert stale.best.step_s <= synchronous.best.step_s


@pytest.mark.slow
def test_of_plans_about_as_fast_the_simplest_is_chosen_whichever_is_ahead() -> None:
    """Links that change its step by half a per cent against the best pipeline's leave data parallelism the choice."""
    job, profile = make_job(layers=4, parallel={"auto": True, "shard": "none"}), make_profile(layers=4, devices=2)
    first = choose(job, profile, search_s=0)
    assert first.best.candidate.stages == 1
    ahead = first.rows[1]
    assert (ahead.prediction.candidate.schedule, ahead.prediction.candidate.stages) == ("chimera", 2)
    assert first.best.step_s * (1 - NEAR) < ahead.prediction.step_s < first.best.step_s
    assert "as fast as chimera on 2 x 1 within 0.5 %, and simpler (it cuts the model there)" in first.rows[0].why
    assert "0.2 % faster" in ahead.why
    assert "less simple: it cuts the model" in ahead.why
    fast, slow = (profile.inside.model_copy(update={"beta_s_per_byte": 1 / rate}) for rate in (8e9, 1e9))
    nearer = choose(job, make_profile(layers=4, devices=2, inside=fast), search_s=0)
    assert nearer.best.candidate.stages == 1
    apart = choose(job, make_profile(layers=4, devices=2, inside=slow), search_s=0)
    assert apart.best.candidate.schedule == "chimera"
    assert apart.best.step_s == min(row.prediction.step_s for row in apart.rows[:10])
    alone = choose(job, profile, search_s=0, top=1)  # found even where it is not among the fastest ``top``
    assert alone.plan == first.plan


def test_losers_say_what_cost_them_most() -> None:
    decision = choose(make_job(batch=16), make_profile(), search_s=0)
    by_kind = {label(row.prediction.candidate): row.why for row in decision.rows}
    assert re.search(r"(slower|as long): it uses 1 device, against \d", by_kind["single device"])
    assert "recomputes activations" in by_kind["early-recompute"]
    assert re.search(r"bubbles \d+% against \d+%", by_kind["model-parallel"])
    assert re.search(r"bubbles \d+% against \d+%", by_kind["gems"])


@pytest.mark.slow
def test_slow_links_between_hosts_make_data_parallelism_lose_to_a_pipeline_and_back() -> None:
    job = make_job(batch=16)
    slow = make_profile().between.model_copy(update={"beta_s_per_byte": 1 / 2e7})
    assert choose(job, make_profile(between=slow, inside=slow), search_s=0).best.candidate.stages > 1
    free = slow.model_copy(update={"beta_s_per_byte": 0.0, "alpha_s": 0.0})
    assert choose(job, make_profile(between=free, inside=free), search_s=0).best.candidate.stages == 1


@pytest.mark.slow
def test_narrow_messages_count_with_the_bytes_that_are_sent() -> None:
    """Half the bytes over links of half the bandwidth: the same decision, and the plan says what it was made for."""
    wishes = {"auto": True, "stages": 4}
    link = make_profile().between
    slow, half = (link.model_copy(update={"beta_s_per_byte": beta}) for beta in (1 / 1e8, 1 / 2e8))
    narrow = choose(
        make_job(parallel=wishes | {"wire_dtype": "bfloat16"}), make_profile(between=slow, inside=slow), search_s=0
    )
    wide = choose(make_job(parallel=wishes), make_profile(between=half, inside=half), search_s=0)
    assert narrow.best.step_s == wide.best.step_s
    assert narrow.best.step_s < choose(
        make_job(parallel=wishes), make_profile(between=slow, inside=slow), search_s=0
    ).best.step_s  # fmt: skip
    assert (narrow.plan.parallel.wire_dtype, wide.plan.parallel.wire_dtype) == ("bfloat16", None)


@pytest.mark.slow
def test_memory_decides_and_the_faster_plan_says_what_would_fit() -> None:
    job = make_job(batch=16)
    roomy = choose(job, make_profile(), search_s=0)
    need = max(roomy.best.memory_bytes)
    tight = choose(job, make_profile(memory_bytes=0.8 * need), search_s=0)
    assert tight.best.step_s > roomy.best.step_s
    assert max(tight.best.memory_bytes) <= 0.8 * need
    too_large = [row for row in tight.rows if not row.prediction.fits]
    assert too_large
    for row in too_large:
        assert re.match(r"does not fit: [\d.]+ [GM]iB over on device \d, \w+ [\d.]+ [GM]iB", row.why)


@pytest.mark.slow
def test_the_smaller_micro_batch_that_is_said_to_fit_does_and_the_next_larger_does_not() -> None:
    job = make_job(batch=16, parallel={"auto": True, "shard": "none", "innermost": "stages"})
    need = max(choose(job, make_profile(), search_s=0).best.memory_bytes)
    said: list[tuple[int, int]] = []
    for part in (0.8, 0.5):
        profile = make_profile(memory_bytes=part * need)
        judge = Predictor(profile, job.train, 4)
        for row in choose(job, profile, search_s=0).rows:
            if not (more := re.search(r"; microbatch (\d+) would fit$", row.why)):
                continue
            c, size = row.prediction.candidate, int(more[1])
            said.append((c.microbatch, size))
            samples = c.microbatch * c.microbatches
            for n in (n for n in (1, 2, 4, 8, 16) if size <= n <= c.microbatch):
                made = judge.predict(replace(c, microbatch=n, microbatches=samples // n))
                assert made.fits == (n == size), (c, n)
    assert {(4, 2), (4, 1)} <= set(said)  # of the second, 2 does not fit either


def test_recomputation_keeps_as_much_as_memory_holds() -> None:
    """Below the memory of 1F1B the planner recomputes, and with a little more it recomputes less."""
    wishes = {"auto": True, "schedule": "1f1b", "stages": 4, "replicas": 1}
    job = make_job(layers=4, batch=16, parallel=wishes)
    bare = choose(job, make_profile(layers=4), search_s=0)
    need = max(bare.best.memory_bytes)
    steps, shares, layers = [], [], []
    for part in (0.75, 0.85, 0.95):
        profile = make_profile(layers=4, memory_bytes=part * need)
        rows = choose(job, profile, search_s=0).rows  # the choice itself may be a simpler one, nearly as fast
        result = min((row.prediction for row in rows if row.prediction.fits), key=lambda p: p.step_s)
        steps.append(result.step_s)
        assert max(result.memory_bytes) <= part * need
        judge = Predictor(profile, job.train, 4)
        kept, recomputed = (
            judge.predict(replace(bare.best.candidate, recompute=how)) for how in ("microbatches", "layers")
        )
        shares.append(sum(kept.keep or ()))
        layers.append(len(recomputed.recomputed or ()))
        assert result.step_s <= min(kept.step_s, recomputed.step_s) * (1 + 1e-9)
    assert steps == sorted(steps, reverse=True)
    assert shares == sorted(shares)
    assert layers == sorted(layers, reverse=True)


def test_few_micro_batches_recompute_some_of_their_layers() -> None:
    """One micro-batch in flight is kept or not; of its layers, as many as memory holds."""
    wishes = {"schedule": "1f1b", "stages": 2, "replicas": 1, "microbatch": 8, "recompute": "auto"}
    job = make_job(layers=8, batch=64, parallel=wishes)
    need = max(choose(job, make_profile(layers=8), search_s=0).best.memory_bytes)
    decision = choose(job, make_profile(layers=8, memory_bytes=0.8 * need), search_s=0)
    best = decision.best
    assert best.candidate.recompute == "layers"
    assert max(best.memory_bytes) <= 0.8 * need
    plan = Plan.model_validate_json(decision.plan.model_dump_json())
    recomputed = plan.parallel.recompute
    assert recomputed == tuple(sorted(best.recomputed or ()))
    assert recomputed
    for layers in plan.cut:  # its last layers, and not all of them
        mine = [i for i in layers if i in recomputed]
        assert mine == list(layers[len(layers) - len(mine) :])
        assert len(mine) < len(layers)
    whole = choose(job, make_profile(layers=8, memory_bytes=0.8 * need), search_s=0, policy="largest-microbatch")
    assert best.step_s < whole.best.step_s
    schedule = build_schedule(plan, 64)
    assert simulate(schedule, best.costs).makespan == pytest.approx(best.step_s, rel=0.05)
    row = as_json(decision)["candidates"][0]
    assert (row["recompute"], row["recomputed_layers"]) == ("layers", list(recomputed))


@pytest.mark.slow
def test_a_first_plan_is_looked_for_until_all_costs_are_known() -> None:
    """Where none fits that shares nothing, the search would go on until all are ruled out."""
    looks: list[int] = []

    def ready() -> bool:
        looks.append(1)
        return len(looks) > 2

    small = make_profile().model_copy(update={"memory_bytes": 1.0 * MIB})
    for profile, most in ((small, 3), (make_profile(), 100)):
        looks.clear()
        watch = Watch(Budget(60.0))
        look_for_first(make_job(), profile, None, watch, ready if profile is small else lambda: False)
        assert len(looks) <= most
        assert (watch.first_plan is None) == (profile is small)


@pytest.mark.slow
def test_a_choice_goes_on_from_the_look_for_a_first_plan() -> None:
    job, profile, shared = make_job(), make_profile(), make_profile(devices=2)
    earlier = look_for_first(job, profile, None, Watch(Budget(60.0)), lambda: False)
    assert earlier is not None
    alone = earlier.judge.by[ALONE]
    predicted = len(alone._predicted)
    sharing = {Sharing(tensor=2): shared}
    later, fresh = (choose(job, profile, search_s=0, shared=sharing, earlier=one) for one in (earlier, None))
    assert (later.plan, later.rows) == (fresh.plan, fresh.rows)
    assert predicted
    assert choice_of(job, profile, profile.devices, shared=sharing, earlier=earlier).judge.by[ALONE] is alone
    other = choice_of(job, profile, profile.devices, shared=sharing, greedy=True, earlier=earlier)
    assert other.judge.by[ALONE] is not alone


def test_nothing_fits_names_the_term_the_excess_and_what_would() -> None:
    with pytest.raises(SpecError, match="no plan fits") as caught:
        choose(make_job(), make_profile(memory_bytes=130 * MIB), search_s=0)
    error = caught.value
    assert error.where == "memory"
    assert re.search(r"needs [\d.]+ GiB, [\d.]+ GiB more than there are: .* takes? [\d.]+ GiB", error.why)
    assert re.search(r"device \d+( of each copy)? \(layers \d+ to \d+", error.why)
    need = float(re.search(r"use devices of ([\d.]+) GiB", error.fix).group(1))  # type: ignore[union-attr]
    assert choose(make_job(), make_profile(memory_bytes=need * GIB), search_s=0).best.fits


@pytest.mark.slow
def test_more_devices_help_where_the_error_says_so() -> None:
    profile = make_profile(layers=8, devices=2, memory_bytes=190 * MIB)
    heavy = profile.model_copy(
        update={"layers": tuple(x.model_copy(update={"kept_bytes": 1e5, "output_bytes": 1e4}) for x in profile.layers)}
    )
    with pytest.raises(SpecError) as caught:
        choose(make_job(layers=8), heavy, search_s=0)
    devices = int(re.search(r"use (\d+) devices", caught.value.fix).group(1))  # type: ignore[union-attr]
    assert choose(make_job(layers=8), heavy, devices, search_s=0).best.fits


LIGHT = {"kept_bytes": 1e5, "output_bytes": 1e4}
HEAD = 5
CAUSES: dict[str, tuple[float, dict[str, object], dict[int, dict[str, float]], Any]] = {
    "optimizer state": (150, LIGHT, {}, "auto"),
    "an embedding": (700, LIGHT, {0: {"parameters": 60_000_000}}, "auto"),
    "a head's logits": (600, LIGHT, {HEAD: {"kept_bytes": 300 * MIB, "workspace_bytes": 400 * MIB}}, "auto"),
    "stage replicas": (200, LIGHT, {}, {"auto": True, "schedule": "chimera", "stages": 2}),
    "large micro-batches": (300, {}, {}, {"auto": True, "microbatch": 8, "stages": 2}),
    "kept activations": (380, {}, {}, {"auto": True, "recompute": "none", "schedule": "gpipe", "stages": 2}),
}
"""By what is too large: MiB of a device, changes to all layers and to single ones, keys of ``parallel``."""
DAILY = ("stage replicas", "an embedding")


@pytest.mark.slow
@pytest.mark.parametrize("cause", [*DAILY, *exhaustive(*(cause for cause in CAUSES if cause not in DAILY))])
def test_everything_that_is_said_to_help_helps(cause: str) -> None:
    mib, everywhere, single, parallel = CAUSES[cause]
    profile = make_profile(layers=4, devices=2, memory_bytes=mib * MIB)
    layers = tuple(x.model_copy(update={**everywhere, **single.get(i, {})}) for i, x in enumerate(profile.layers))
    profile = profile.model_copy(update={"layers": layers})
    with pytest.raises(SpecError, match="no plan fits") as caught:
        choose(make_job(layers=4, parallel=parallel), profile, search_s=0)
    ways = caught.value.fix.split(", or ")
    assert ways
    for way in ways:
        own, train, size, devices = parallel, {}, profile.memory_bytes, None
        if more := re.fullmatch(r"use devices of ([\d.]+) GiB", way):
            size = float(more[1]) * GIB
        elif more := re.fullmatch(r"use (\d+) devices", way):
            devices = int(more[1])
        else:
            section, key, value = re.fullmatch(r"(\w+)\.(\w+): (\w+)", way).groups()  # type: ignore[union-attr]
            meant: Any = int(value) if value.isdigit() else value
            own, train = (own, {key: meant}) if section == "train" else ({**own, key: meant}, {})
        tried = profile.model_copy(update={"memory_bytes": size})
        assert choose(make_job(layers=4, parallel=own, **train), tried, devices, search_s=0).best.fits, way
        # One step less does not help; a key that is changed or not has no smaller step than the job itself.
        if size > profile.memory_bytes:
            tried = profile.model_copy(update={"memory_bytes": size - 0.1 * GIB})
        elif devices is not None:
            devices -= 1
        elif key == "microbatch":
            own = {**own, key: 2 * meant}
        else:
            continue
        with pytest.raises(SpecError, match="no plan fits"):
            choose(make_job(layers=4, parallel=own), tried, devices, search_s=0)


@pytest.mark.slow
def test_a_shorter_sequence_is_named_where_its_plan_fits() -> None:
    """Of a GPT the costs are computed anew for the sequence that the error names, and for the next longer one."""
    cluster = load_cluster(ROOT / "cluster/devices/h100.yaml").resized(2)

    def planned(sequence: int) -> Decision:
        job = load_job(ROOT / "jobs/quickstart.yaml", [f"model.sequence={sequence}", "train.batch=2"])
        profile = job_profile(job, cluster)
        return choose(job, profile.model_copy(update={"memory_bytes": profile.process_bytes + 40 * MIB}), search_s=0)

    with pytest.raises(SpecError, match="no plan fits") as caught:
        planned(4096)
    first = caught.value.fix.split(", or ")[0]
    named = int(re.fullmatch(r"model.sequence: (\d+)", first).group(1))  # type: ignore[union-attr]
    assert planned(named).best.fits


def test_a_described_device_keeps_a_share_of_itself_free() -> None:
    """A larger one keeps more, so what is asked for is more than what was missing."""
    profile = make_profile(source="analytic", memory_bytes=2 * GIB, base_bytes=0.5 * GIB)
    need = 3.5 * GIB  # 3 of tensors, and 4 GiB of which 3 can be filled
    assert device_gib(profile, need) == 4.0
    assert device_gib(profile.model_copy(update={"source": "measured"}), need) == 3.5


@pytest.mark.slow
def test_wishes_are_kept() -> None:
    job = make_job(batch=16, parallel={"auto": True, "schedule": "zb-v", "microbatch": 2})
    decision = choose(job, make_profile(), search_s=0)
    assert {row.prediction.candidate.schedule for row in decision.rows if row.prediction.candidate.stages > 1} == {
        "zb-v"
    }
    assert decision.plan.parallel.microbatch == 2
    searched = choose(make_job(batch=16, parallel={"auto": True, "schedule": "auto"}), make_profile(), search_s=1.0)
    assert searched.plan.parallel.schedule == "auto"
    assert searched.plan.program.startswith("schedule auto\n")
    stale = choose(make_job(batch=16, parallel={"auto": True, "schedule": "pipedream-2bw"}), make_profile(), search_s=0)
    assert stale.plan.parallel.schedule == "pipedream-2bw"  # asked for by name
    recomputed = choose(make_job(parallel={"auto": True, "replan": True}), make_profile(), search_s=0)
    assert recomputed.plan.parallel.replan
    with pytest.raises(SpecError, match="stages: 7"):
        choose(make_job(parallel={"auto": True, "stages": 7}), make_profile())


@pytest.mark.parametrize(
    ("wish", "clip", "words"),
    [
        ({"recompute": ["block.*"]}, None, "a list of layers depends on the cut"),
        ({"recompute": "stage-aware"}, None, "stage-aware depends on the cut"),
        ({"schedule": "pipedream"}, 1.0, "no global norm"),
        ({"schedule": "auto"}, None, "no time to search"),
    ],
)
def test_a_wish_that_no_plan_could_keep_is_one_clear_error(wish, clip, words) -> None:
    with pytest.raises(SpecError, match=words):
        choose(make_job(parallel={"auto": True, **wish}, clip=clip), make_profile(), search_s=0, top=1)


@pytest.mark.slow
def test_recomputation_is_none_or_all_where_that_is_asked_for() -> None:
    none = choose(make_job(parallel={"auto": True, "stages": 4, "recompute": "none"}), make_profile(), search_s=0)
    assert none.rows
    assert not any(row.prediction.form.recomputes for row in none.rows)
    own = {"auto": True, "schedule": "early-recompute", "recompute": "none"}  # nothing beside what its name says
    assert choose(make_job(parallel=own), make_profile(), search_s=0).plan.parallel.recompute == "none"
    full = choose(make_job(parallel={"auto": True, "stages": 4, "recompute": "full"}), make_profile(), search_s=0)
    assert (full.plan.parallel.recompute, full.plan.parallel.keep) == ("full", None)


def test_numbers_that_the_search_would_not_try_are_tried_where_they_are_asked_for() -> None:
    wishes = {"auto": True, "stages": 2, "schedule": "zeropp", "unit": 5, "chunks": 5}
    plan = choose(make_job(layers=10, parallel=wishes), make_profile(layers=10), search_s=0).plan
    assert (plan.parallel.unit, plan.parallel.chunks, len(plan.cut)) == (5, 5, 10)
    wishes = {"auto": True, "stages": 2, "schedule": "bfs", "chunks": 1}  # gpipe under another name
    assert choose(make_job(parallel=wishes), make_profile(), search_s=0).plan.parallel.schedule == "bfs"


@pytest.mark.slow
def test_a_searched_order_is_no_worse_and_fits() -> None:
    job, profile = make_job(batch=8, clip=1.0), make_profile(seed=9, memory_bytes=0.7 * GIB)
    named = choose(job, profile, search_s=0)
    searched = choose(job, profile, search_s=1.5)
    fitting = [row.prediction for row in searched.rows if row.prediction.fits]
    fastest = min(p.step_s for p in fitting if p.form.versions == "flush")
    assert fastest <= named.best.step_s * (1 + 1e-9)
    assert searched.best.step_s <= fastest * (1 + NEAR)
    assert max(searched.best.memory_bytes) <= 0.7 * GIB


@pytest.mark.slow
def test_groups_that_share_layers_are_candidates_like_others() -> None:
    profile = make_profile(devices=8)
    shared = {(2, halves): make_shared(profile, 2, halves) for halves in (False, True)}
    job = make_job(batch=4, clip=1.0)
    decision = choose(job, profile, search_s=0, shared=shared)
    alone = choose(job, profile, search_s=0)
    assert decision.best.step_s < alone.best.step_s  # more devices than samples and layers can keep busy
    best = decision.best.candidate
    assert (best.tensor, best.devices) == (2, decision.plan.parallel.devices)
    assert decision.plan.parallel.update == "wait"
    assert {row.prediction.candidate.tensor for row in decision.rows} == {1, 2}
    for row in as_json(decision)["candidates"]:
        assert len(row["memory_bytes"]) == row["stages"] * row["replicas"] * row["tensor"] <= 8
    lost = choose(job, profile, search_s=0, shared={(2, False): make_shared(profile, 1)})  # that gains nothing
    (row,) = [row for row in lost.rows if row.prediction.candidate.tensor == 2][:1]
    assert lost.best.candidate.tensor == 1
    assert "slower" in row.why


def test_a_size_of_groups_may_be_asked_for() -> None:
    profile = make_profile()
    asked = make_job(batch=16, parallel={"auto": True, "tensor": 2})
    decision = choose(asked, profile, search_s=0, shared={(2, False): make_shared(profile, 2)})
    assert {row.prediction.candidate.tensor for row in decision.rows} == {2}
    groups = {(2, False): make_shared(profile, 2)}
    wished = {"auto": True, "tensor": 2, "stages": 1, "microbatch": 1}
    whole, divided = (
        choose(make_job(batch=16, parallel={**wished, "shard": level}), profile, search_s=0, shared=groups).best
        for level in ("none", "zero1")
    )
    assert (divided.candidate.tensor, divided.candidate.shard) == (2, "zero1")
    assert max(divided.memory_bytes) < max(whole.memory_bytes)
    with pytest.raises(SpecError, match="tensor: 2") as caught:
        choose(asked, profile, search_s=0)
    assert "computed, not measured" in caught.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["auto", {"auto": True, "schedule": "1f1b"}, {"auto": True, "schedule": "auto"}])
def test_the_plan_is_what_was_predicted(parallel, tmp_path) -> None:
    """The plan file, read back and built as the runtime builds it, takes the predicted time under the same costs."""
    job, profile = make_job(batch=8, clip=1.0, parallel=parallel), make_profile()
    decision = choose(job, profile, search_s=0.5)
    decision.plan.save(tmp_path / "plan.json")
    plan = Plan.model_validate_json((tmp_path / "plan.json").read_bytes())
    assert plan == decision.plan
    schedule = build_schedule(plan, job.train.batch)
    best = decision.best
    assert schedule.devices == best.candidate.devices
    assert [i for part in plan.cut for i in part] == list(range(len(profile.layers)))
    makespan = simulate(schedule, best.costs).makespan
    assert best.step_s <= makespan + 1.1e-3  # the norm; steps may overlap where nothing waits for it
    assert best.step_s >= best.busy_s
    assert max(peak_activations(schedule)) >= 1


def test_json_is_the_contracts() -> None:
    decision = choose(make_job(), make_profile(), search_s=0)
    told = as_json(decision)
    assert {"best", "candidates", "searched", "seconds"} <= told.keys()
    assert Plan.model_validate(told["best"] | {"cut": tuple(map(tuple, told["best"]["cut"]))})
    for row in told["candidates"]:
        assert {
            "schedule", "stages", "replicas", "microbatch", "chunks", "unit", "recompute", "predicted_step_s",
            "throughput", "bubble_ratio", "memory_bytes", "fits", "why",
        } <= row.keys()  # fmt: skip
        assert len(row["memory_bytes"]) == row["stages"] * row["replicas"]
        assert row["throughput"] == pytest.approx(8 / row["predicted_step_s"])
        assert 0 <= row["bubble_ratio"] < 1
        assert row["fits"] == (max(row["memory_bytes"]) <= row["capacity_bytes"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "bfloat16"}, "was taken for bfloat16"),
        ({"memory_bytes": 0.0}, "no memory"),
    ],
)
def test_a_profile_that_cannot_be_planned_with_is_one_clear_error(change, words) -> None:
    with pytest.raises(SpecError, match=words):
        choose(make_job(), make_profile(**change))


def test_a_profile_of_another_model_or_without_times_is_one_clear_error() -> None:
    with pytest.raises(SpecError, match="has 8 layers, the job's model 10"):
        choose(make_job(layers=8), make_profile(layers=6))
    profile = make_profile()
    first, *others = profile.layers
    for times, words in (({}, "no times of layer embedding"), ({1: first.times[1]}, "different micro-batch sizes")):
        broken = profile.model_copy(update={"layers": (first.model_copy(update={"times": times}), *others)})
        with pytest.raises(SpecError, match=words):
            choose(make_job(), broken)


@pytest.mark.slow
def test_the_choice_does_not_depend_on_how_many_rows_are_named() -> None:
    """Shards and searches are tried with the same best plans."""
    job, profile = make_job(layers=4), make_profile(layers=4, devices=4)
    decisions = {top: choose(job, profile, search_s=0, top=top) for top in (1, 3, 10, 30)}
    assert len({decision.plan.text() for decision in decisions.values()}) == 1
    for top, decision in decisions.items():
        ranked = [row.prediction for row in decision.rows if row.group == "ranked"]
        assert len(ranked) == top
        steps = [float(f"{p.step_s:.5e}") for p in ranked[1:]]
        assert steps == sorted(steps)


def test_a_model_with_batch_norm_is_not_divided() -> None:
    job = make_job(parallel={"auto": True, "shard": "zero1"})
    profile = make_profile().model_copy(update={"batch_statistics": True})
    with pytest.raises(SpecError, match="batch norm sums its statistics over whole replicas"):
        choose(job, profile, search_s=0)
    free = make_job(layers=4, batch=8)
    small = make_profile(layers=4, devices=2).model_copy(update={"batch_statistics": True})
    assert all(row.prediction.candidate.shard == "none" for row in choose(free, small, search_s=0).rows)
