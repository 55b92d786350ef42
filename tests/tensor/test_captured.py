"""A divided model, captured, cut into stages and run by the executor, is the whole one: with dropout, float64, 1e-9."""

from __future__ import annotations

import pytest
import torch

from raypipe.models import build_model
from tests.exhaustive import exhaustive
from tests.runtime.compiled.pieces import compiled_device, step_of
from tests.runtime.runs.one_device import Outcome, even_cut, run_step
from tests.runtime.runs.test_any_model import CASES, DROPS, fields_of, job_of
from tests.tensor.threads import run_tensor_ranks

DROPOUT_INSIDE = {"gpt2", "bert", "t5"}
"""Those that drop attention weights, of which every member has its heads'."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "traced", "sequence"),
    [("gpt2", False, False), ("t5", False, False), ("vit", False, False), ("gpt2", True, False),
     ("gpt2", False, True), ("qwen3", False, True), ("qwen3", True, True),
     *exhaustive(("opt", False, False), ("qwen3", False, False), ("bert", False, False), ("t5", True, False),
                 ("bert", True, False), ("qwen3", True, False), ("opt", False, True), ("bert", False, True),
                 ("gpt2", True, True))],
)  # fmt: skip
def test_a_divided_model_trains_as_the_whole_one(case: str, traced: bool, sequence: bool) -> None:
    """Also as the pieces of compiled stages, which are the same on every rank: no rank is in their graphs."""
    spec, rows = CASES[case]
    job, size = job_of(spec), 2
    parallel = job.parallel.model_copy(update={"tensor": size, "sequence_parallel": sequence})
    divided = job.model_copy(update={"parallel": parallel})
    whole = build_model(job, fields_of(rows))
    rows = whole.task.complete(rows)
    expected = run_step(whole, even_cut(whole, 3), rows, torch.float64, 2)

    graphs: dict[int, list[str]] = {}

    def work(rank: int, _tensor_rank: object) -> Outcome:
        model = build_model(divided, fields_of(CASES[case][1]), rank)
        if not traced:
            return run_step(model, even_cut(model, 3), rows, torch.float64, 2, split=True)
        made, stages, reports = compiled_device(model, even_cut(model, 3), rows, torch.float64, 2, split=True)
        assert [report.reason for report in reports] == [None] * 3
        graphs[rank] = [pieces.backward.graph.code for stage in stages for *_, pieces in stage.parts]
        return step_of(made)

    tensor_ranks = run_tensor_ranks(size, work)
    assert not traced or graphs[0] == graphs[1]
    model = build_model(divided, fields_of(CASES[case][1]), 0)
    assert any(site.divided_dim is not None for site in model.sites.values()) == (
        case in DROPOUT_INSIDE or (sequence and case in DROPS)
    )
    if sequence:
        assert sum(o.target == "raypipe.scatter_sequence.default" for o in model.graph.operations) > 3
    for outcome in tensor_ranks:
        assert outcome.loss == pytest.approx(expected.loss, abs=1e-9, rel=0)
    for name, gradient in expected.gradients.items():
        shares = [outcome.gradients[name] for outcome in tensor_ranks]
        if name in model.shards:
            shares = [model.shards[name].join(shares)]
        for share in shares:
            torch.testing.assert_close(share, gradient, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
