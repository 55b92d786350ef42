"""Which layers are computed again."""

import pytest

from raypipe.errors import SpecError
from raypipe.job import job_from
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import layers_to_recompute, named_layers
from raypipe.plan.plan import Plan, build_schedule
from tests.job.test_load import JOB

CUT = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))


def again(**keys: object) -> frozenset[int] | None:
    return layers_to_recompute(ParallelSpec.model_validate(keys), CUT)


def test_a_stage_keeps_its_first_layers() -> None:
    assert again(recompute="stage-aware", alphas=[0.0, 0.34, 0.99, 1.0]) == {0, 1, 2, 4, 5, 8}
    # 2/3, and 3/2 of that or 1 for the next two.
    assert again(recompute="stage-aware", alphas=0.67) == {2}
    assert again(recompute="stage-aware", alphas=0.0) == set(range(9))
    assert again(recompute=[1, 7]) == {1, 7}
    assert again(recompute="full") is None


def test_stages_that_keep_everything_have_no_r() -> None:
    def recomputing(schedule: str, **keys: object) -> set[int]:
        parallel = ParallelSpec.model_validate({"schedule": schedule, "stages": 4, **keys})
        return {t.stage for t in build_schedule(Plan.of(parallel, CUT, 8), 8).tasks() if t.kind == "R"}

    assert recomputing("1f1b", recompute=[1, 7]) == {0, 2}
    assert recomputing("shifted-critical-path", recompute="stage-aware", alphas=0.67) == {0}
    assert recomputing("shifted-critical-path", recompute="stage-aware", alphas=1.0) == set()
    assert recomputing("shifted-critical-path", recompute="stage-aware", alphas=0.0) == {0, 1, 2}
    assert recomputing("1f1b", recompute="stage-aware", alphas=[1.0, 0.0, 0.0, 0.5]) == {1, 2, 3}


def test_layers_by_name() -> None:
    names = ["embedding", "block.0", "block.1", "head"]
    assert named_layers(["block.*", 0], names) == (0, 1, 2)
    with pytest.raises(SpecError, match="did you mean"):
        named_layers(["blok.1"], names)
    with pytest.raises(SpecError, match="use 0 to 3"):
        named_layers([4], names)


def test_several_stages_on_a_device_need_their_own_shares() -> None:
    parallel = {"schedule": "zb-v", "stages": 2, "microbatch": 2, "recompute": "stage-aware"}
    with pytest.raises(SpecError, match="give 4 shares"):
        job_from({**JOB, "parallel": {**parallel, "alphas": 0.5}})
    with pytest.raises(SpecError, match="3 shares for 4 stages"):
        job_from({**JOB, "parallel": {**parallel, "alphas": [0.5, 0.5, 1.0]}})
    job_from({**JOB, "parallel": {**parallel, "alphas": [0.5, 0.5, 1.0, 1.0]}})
