"""A step whose micro-batches go in another order computes the same, dropout included; which order, the driver knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.data import declared_fields, open_data, prepare_data, token_budget
from raypipe.errors import SpecError
from raypipe.job import JobSpec
from raypipe.models import build_model
from raypipe.plan.online.better_order import running_of
from raypipe.runtime.calls import RowOrders
from raypipe.runtime.session.session_job import check_job
from raypipe.train import make_plan
from tests.runtime.compiled.pieces import assert_same, compiled_device, step_of
from tests.runtime.runs.one_device import even_cut, one_device
from tests.runtime.runs.small_runs import job_for
from tests.runtime.runs.test_token_budget_runs import documents, one_process, packed_job

pytest.importorskip("transformers")
GPT2 = {"vocab_size": 90, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64}


def prepared(folder: Path, **train: object) -> JobSpec:
    path = documents(folder / "rows.npz")
    given = {"batch": None, "tokens_per_step": 120, "microbatch_tokens": 40, **train}
    data = {"type": "arrays", "path": str(path), "pad_to_multiple_of": 4}
    job = job_for({"hf": "gpt2", "config": GPT2}, data, {"schedule": "1f1b", "stages": 2, "microbatch": 1}, **given)
    prepare_data(job, build_model(job, declared_fields(job.data)).task, folder / "data")
    return job


def test_a_step_in_another_order_is_the_same(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    model = build_model(job, declared_fields(job.data))
    assert GPT2.keys().isdisjoint(("resid_pdrop", "attn_pdrop", "embd_pdrop"))  # a tenth is dropped
    losses, weights = [], []
    for order in (None, (2, 0, 4, 1, 3)):
        data = open_data(tmp_path / "data", model.task, 4, budget=token_budget(job, 1, model))
        rows = data.batch("train", 3, 0, job.train.batch)
        one = one_device(model, even_cut(model, 2), rows, torch.float64, 1, data=data, split=True)
        if order is not None:
            one.executor.feed.arrange(0, order)
        losses.append([one.executor.run(one.program, step, 0.05).loss_sum for step in range(2)])
        weights.append(torch.cat([p.detach().flatten() for stage in one.stages for p in stage.named.values()]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12, rel=0)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", ["1f1b", "two rows a micro-batch"])
def test_the_loss_is_that_of_each_document_alone(plan: str, tmp_path: Path) -> None:
    job = packed_job(documents(tmp_path / "rows.npz"), plan, steps=4)
    model = build_model(job, declared_fields(job.data))
    prepare_data(job, model.task, tmp_path / "data")
    data = open_data(tmp_path / "data", model.task, 4, budget=token_budget(job, 1, model))
    rows = data.batch("train", 3, 0, job.train.batch)
    cut, each = even_cut(model, 2), job.parallel.microbatch
    one = one_device(model, cut, rows, torch.float64, each, data=data, split=True, train=job.train)
    losses = [one.executor.run(one.program, step, job.train.lr).loss_sum for step in range(4)]
    assert losses == pytest.approx(one_process(job, tmp_path / "data")[:4], abs=1e-9, rel=0)


def test_compiled_stages_compute_the_same(tmp_path: Path) -> None:
    job = packed_job(documents(tmp_path / "rows.npz"), "1f1b", steps=4)
    model = build_model(job, declared_fields(job.data))
    prepare_data(job, model.task, tmp_path / "data")
    data = open_data(tmp_path / "data", model.task, 4, budget=token_budget(job, 1, model))
    rows = data.batch("train", 3, 0, job.train.batch)
    lengths = data.lengths("train", 3, 0, job.train.batch)
    rows = {name: t[:, : lengths["labels"].min()].contiguous() for name, t in rows.items()}  # of one shape
    cut = even_cut(model, 2)
    eager = one_device(model, cut, rows, torch.float64, 1, split=True)
    made, _, reports = compiled_device(model, cut, rows, torch.float64, 1, split=True)
    assert reports
    assert_same(step_of(made), step_of(eager))


def test_the_driver_searches_each_step_once(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    running = running_of(make_plan(job), job.train.batch, False)
    orders = RowOrders(job, tmp_path / "data")
    found = orders.of(running, range(4), 0, None)
    assert found
    assert all(sorted(order) == list(range(job.train.batch)) for order in found.values())
    assert orders.of(running, range(1, 4), 0, 1e-9) == {step: o for step, o in found.items() if step}  # as before
    orders.forget()
    assert orders.of(running, range(4), 0, 1e-9) == {}


def test_steps_of_samples_have_none(tmp_path: Path) -> None:
    job = prepared(tmp_path, tokens_per_step=None, microbatch_tokens="auto", batch=8)
    running = running_of(make_plan(job), job.train.batch, False)
    assert RowOrders(job, tmp_path / "data").of(running, range(4), 0, None) == {}


def test_sessions_refuse_token_budgets(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    with pytest.raises(SpecError, match=r"train\.tokens_per_step: sessions run the sequences of their calls"):
        check_job(job, make_plan(job))
