"""Slices and divided sequences in the search: chosen where nothing else fits, and never under their lower bound."""

from pathlib import Path

import numpy as np
import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.experts import all_to_all_seconds
from raypipe.cost.hosts import Layout
from raypipe.cost.profile import LayerProfile, Slicing, TaskTimes
from raypipe.cost.sizes import divided_sequences, slice_times
from raypipe.cost.stages import stage_costs
from raypipe.data import Ragged, flat
from raypipe.errors import CaptureError, SpecError
from raypipe.job.cluster import load_cluster
from raypipe.job.spec import JobSpec, job_from, load_job
from raypipe.partition.job_costs import job_profile
from raypipe.plan.candidate import Candidate, context_counts, grids, slice_counts, slices_refused
from raypipe.plan.choose import choose
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from tests.capture.models import FAMILIES
from tests.job_files import minimal_job

JOB = load_job(Path("jobs/long-sequence.yaml"))
PROFILE = analytic_profile(JOB.model, load_cluster(Path("cluster/devices/h100.yaml")), JOB.train.dtype, [1, 2])


def asking(**parallel: object) -> JobSpec:
    given = {"auto": True, "stages": 8, "tensor": 1, "shard": "none", "schedule": "1f1b", **parallel}
    return job_from({**JOB.model_dump(mode="json"), "parallel": given})


@pytest.mark.slow
def test_a_long_sequence_fits_in_slices_alone() -> None:
    best = choose(asking(), PROFILE, 8, search_s=0).best
    assert best.fits
    assert best.candidate.slices >= 4
    assert max(device.total for device in best.memory) < PROFILE.memory_bytes
    with pytest.raises(SpecError, match="no plan fits"):
        choose(asking(slices=1), PROFILE, 8, search_s=0)
    assert choose(asking(slices=8), PROFILE, 8, search_s=0).plan.parallel.slices == 8


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_no_step_is_shorter_than_its_bound(schedule: str) -> None:
    roomy = PROFILE.model_copy(update={"memory_bytes": 1e15})  # else a bound says that weights alone do not fit
    judge = Predictor(roomy, JOB.train, 24, slices=slice_counts(JOB, PROFILE))
    for stages, slices in ((2, 4), (8, 2), (4, 32)):
        for recompute in ("none", "full"):
            c = Candidate.on(Grid(stages, 1, 1, 4), schedule, slices=slices, recompute=recompute)
            result = judge.predict(c, timed=True)
            assert judge.least(c) <= result.step_s
            assert judge.least_on(c.grid) <= result.step_s


def test_slices_are_tried_where_they_are_known_to_run() -> None:
    assert slice_counts(JOB, PROFILE) == (2, 4, 8, 16, 32)
    assert slices_refused(JOB, PROFILE) is None
    for key in ({"compile": "inductor"}, {"metrics": "a.module:figures"}):
        job = job_from({**JOB.model_dump(mode="json"), "train": {**JOB.train.model_dump(mode="json"), **key}})
        assert slice_counts(job, PROFILE) == ()
        assert slices_refused(job, PROFILE)


@pytest.mark.parametrize(
    ("slicing", "counts"),
    [
        (None, ()), (Slicing(positions=2047), ()), (Slicing(positions=6144), (2, 4)),
        (Slicing(positions=8192, shortest=4096), (2,)), (Slicing(positions=8192, refused="it looks back"), ()),
    ],
)  # fmt: skip
def test_slices_are_no_shorter_than_the_model_allows(slicing: Slicing | None, counts: tuple[int, ...]) -> None:
    profile = PROFILE.model_copy(update={"slicing": slicing})
    assert slice_counts(JOB, profile) == counts
    if slicing is not None and slicing.refused:
        assert slices_refused(JOB, profile) == "it looks back"
        with pytest.raises(SpecError, match="it looks back"):
            choose(asking(slices=4), profile, 8, search_s=0)


def test_a_slice_below_the_smallest_size_keeps_the_overhead() -> None:
    def times(size: int) -> TaskTimes:
        t = 1.0 + 3.0 * size
        return TaskTimes(forward=t, input_grad=t, weight_grad=t, joint=2 * t, recompute=t)

    layer = LayerProfile(name="one", parameters=1, times={1: times(1), 2: times(2)}, kept_bytes=0, output_bytes=0)
    assert slice_times(layer, 1, 4).forward == pytest.approx(1 + 3 / 4)
    assert slice_times(layer, 2, 2).forward == times(1).forward


# Copies that divide sequences in the search: chosen where nothing else fits, and never under their lower bound.


def asking_divided(**parallel: object) -> JobSpec:
    given = {"auto": True, "stages": 1, "tensor": 1, "slices": 1, "shard": "none", "microbatch": 1, **parallel}
    return job_from({**JOB.model_dump(mode="json"), "parallel": given})


def test_a_long_sequence_that_fits_divided_alone() -> None:
    """Whole stages on every device, whose memory holds the model and half of what a sequence needs beside it."""
    small = PROFILE.model_copy(update={"memory_bytes": 0.5e12})
    best = choose(asking_divided(), small, 8, search_s=0)
    assert best.plan.parallel.context > 2
    assert best.best.fits
    for copies in (1, 2):
        with pytest.raises(SpecError, match="no plan fits"):
            choose(asking_divided(context=copies), small, 8, search_s=0)
    assert (
        best.plan.parallel
        == choose(asking_divided(context=best.plan.parallel.context), small, 8, search_s=0).plan.parallel
    )


def test_a_forward_takes_a_share_and_one_gather_a_layer() -> None:
    cut = [range(26)]
    whole = stage_costs(PROFILE, cut, 2, [[0]], split=True)
    parts = stage_costs(divided_sequences(PROFILE, 4), cut, 2, [[0]], copies=4, split=True)
    keys = [2 * layer.key_value_bytes for layer in PROFILE.layers]
    once = sum(all_to_all_seconds(PROFILE, size, Layout(1, 4)) for size in keys)
    assert once > 0
    assert parts.forward[0] - once == pytest.approx(whole.forward[0] / 4, rel=0.02)
    assert parts.input_grad[0] - 2 * once == pytest.approx(whole.input_grad[0] / 4, rel=0.02)
    assert 1 <= parts.weight_grad[0] / (whole.weight_grad[0] / 4) < 1.1  # each adds to the whole matrices' gradients


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_divided_step_is_shorter_than_its_bound(schedule: str) -> None:
    for copies in (2, 4):
        roomy = divided_sequences(PROFILE.model_copy(update={"memory_bytes": 1e15}), copies)
        judge = Predictor(roomy, JOB.train, 24)
        for stages in (1, 2):
            c = Candidate.on(Grid(stages, copies, 1, 8, context=copies), "1f1b" if stages == 1 else schedule)
            result = judge.predict(c, timed=True)
            assert judge.least(c) <= result.step_s
            assert judge.least_on(c.grid) <= result.step_s


def test_which_copies_may_divide_sequences() -> None:
    assert context_counts(JOB, PROFILE, 64) == (2, 4, 8, 16)
    assert context_counts(JOB, PROFILE, 8) == (2, 4, 8)
    odd = PROFILE.model_copy(update={"slicing": Slicing(positions=12288)})
    assert context_counts(JOB, odd, 8) == (2, 4)
    assert {(g.replicas, g.microbatches) for g in grids(4, 2, 1, 1, 1, context=2)} == {(2, 2), (4, 1)}
    for parallel, says in (({"context": 3}, "use context: 2"), ({"context": 2, "tensor": 2}, "not costed")):
        with pytest.raises(SpecError, match=says):
            choose(asking_divided(**parallel), PROFILE, 8, search_s=0)


def test_rows_of_documents_are_planned_where_a_job_says_how_many_copies_divide_them(tmp_path: Path) -> None:
    """Of shared heads once, and not where a mask hides more than other documents."""
    pytest.importorskip("transformers")
    rows = Ragged.of([np.full(n, 3) for n in (40, 7, 12, 30)])
    np.savez(tmp_path / "rows.npz", **flat({"input_ids": rows, "labels": rows}))

    def packed(family: str = "llama", **keys: object) -> JobSpec:
        return minimal_job(
            {"hf": family, "config": {**FAMILIES[family], "max_position_embeddings": 64}},
            {"type": "arrays", "path": str(tmp_path / "rows.npz")},
            {"auto": True, **keys}, batch=8, tokens_per_step=256, microbatch_tokens=64,
        )  # fmt: skip

    cluster = load_cluster(Path("cluster/devices/h100.yaml"))
    alone, divided = job_profile(packed(), cluster), job_profile(packed(context=2), cluster)
    assert divided.layers[1].key_value_bytes == 2 * 64 * (2 * 8) * 4  # of two heads of keys, which four share
    chosen = choose(packed(context=2), divided, 4, search_s=0)
    assert chosen.plan.parallel.context == 2
    assert choose(packed(), alone, 4, search_s=0).plan.parallel.context == 1
    with pytest.raises(SpecError, match="its rows hold several documents"):
        choose(packed(context=2), alone, 4, search_s=0)
    assert slices_refused(
        packed(context=2), divided.model_copy(update={"slicing": Slicing(positions=4096, packed=True)})
    )
    with pytest.raises(CaptureError, match="its mask is not known to be causal within documents"):
        job_profile(packed("mistral", context=2), cluster)
