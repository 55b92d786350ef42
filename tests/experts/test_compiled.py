"""Compiled stages whose experts are divided: all but the experts is compiled, and gives what an eager stage does."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch

from raypipe.models import LayeredModel, build_model
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime.compiled.toolchain import missing_toolchain
from tests.exhaustive import crossed
from tests.experts import test_runs
from tests.experts.families import FAMILIES
from tests.experts.test_job_key import job_of
from tests.experts.threads import run_copies
from tests.runtime.compiled.pieces import assert_same, compiled_device, interpreted, step_of
from tests.runtime.runs.one_device import run_step
from tests.runtime.runs.small_runs import drive


def model_of(family: str, copies: int, rank: int, dtype: str = "float64") -> LayeredModel:
    job = job_of({"replicas": copies, "experts": copies}, {"dtype": dtype},
                 {"hf": family, "config": FAMILIES[family], "sequence": 16})  # fmt: skip
    return build_model(job, None, 0, expert_rank=rank)


def rows_of(rank: int, samples: int = 4) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 257, (samples, 17), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"),
    crossed(["mixtral", "deepseek_v3"], [{}, {"split": True}, {"recompute": True}, {"pairs": True}]), ids=str,
)  # fmt: skip
def test_pieces_give_the_losses_and_gradients_of_eager_stages(family: str, variant: dict[str, Any]) -> None:
    """Two copies, each with half of the experts and samples of its own: tokens travel in every forward and backward."""

    one, models = Lock(), [model_of(family, 2, rank) for rank in range(2)]

    def work(rank: int, _member: Any) -> None:
        model = models[rank]
        cut = [range(2), range(2, model.count)]
        eager = run_step(model, cut, rows_of(rank), torch.float64, 2, **variant)
        with one:  # nothing travels while stages are traced
            made, traced, reports = compiled_device(model, cut, rows_of(rank), torch.float64, 2, interpreted, **variant)
        assert [report.reason for report in reports] == [None, None]
        targets = [str(node.target) for one in traced for _, joint, _ in one.parts for node in joint.graph.graph.nodes]
        assert sum("raypipe.experts.default" in target for target in targets) >= 1
        assert sum("raypipe.experts_backward.default" in target for target in targets) >= 1
        assert_same(step_of(made), eager)

    run_copies(2, work)


@pytest.mark.runs
@pytest.mark.exhaustive
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipev"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_runs_give_the_losses_of_eager_stages(family: str, schedule: str, stage_pool, text_folder, tmp_path) -> None:
    model = {"hf": family, "config": FAMILIES[family], "sequence": 16}
    parallel = {"schedule": schedule, "stages": 1, "replicas": 2, "experts": 2, "microbatch": 1}
    done = {}
    for name, train in (("eager", {}), ("compiled", {"compile": "inductor", "compile_first": True})):
        job = test_runs.job_of(text_folder, parallel, model, **train)
        done[name] = drive(job, stage_pool, tmp_path / name)
    events = read_rows(tmp_path / "compiled" / EVENTS)
    assert {row["reason"] for row in events if row["event"] == "compiled"} == {None}
    assert done["compiled"].losses == pytest.approx(done["eager"].losses, abs=1e-9, rel=0)
    assert done["compiled"].val_losses == pytest.approx(done["eager"].val_losses, abs=1e-9, rel=0)
    assert [row["expert_load"] for row in done["compiled"].rows] == [row["expert_load"] for row in done["eager"].rows]
