"""What CONTRIBUTING.md says of new things is all that they take: each is added here through the public seams alone."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import Field

from docs.gallery import entries
from docs.reference_pages import keys_page
from raypipe.cli import run
from raypipe.errors import SpecError
from raypipe.job import ImportSpec, JobSpec, TrainSpec, job_from
from raypipe.job.field_types import Count
from raypipe.job.reading import checked
from raypipe.models.loss_function import loss_function
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import SCHEDULES, Family, Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BW
from raypipe.simulate.engine import simulate

JOB = {
    "name": "mine",
    "model": {"type": "gpt", "layers": 2, "hidden": 8, "heads": 1, "sequence": 8},
    "data": {"path": "stdlib"},
    "train": {"steps": 1, "batch": 4},
    "parallel": {"schedule": "last-first", "stages": 2, "microbatch": 1},
}


def last_first(shape: Shape, costs: CostTable) -> Schedule:
    """All forwards, then all backwards, the newest micro-batch first: GPipe with a stack instead of a queue."""
    stages, ids = range(shape.devices), range(shape.microbatches)
    orders = [[*(Task("F", s, (m,)) for m in ids), *(Task(BW, s, (m,)) for m in reversed(ids))] for s in stages]
    return Schedule.of_chain("last-first", [tuple(stages)], orders, shape.microbatches)


def test_a_new_schedule_is_a_generator_and_a_row(monkeypatch, capsys) -> None:
    monkeypatch.setitem(SCHEDULES, "last-first", Family(make=last_first, about="a stack of micro-batches", fills=True))
    made = generate("last-first", Shape(devices=3, microbatches=4))
    assert simulate(made, CostTable.even(3)).makespan == (4 + 3 - 1) * 3
    assert run(["schedule", "--list"]) == 0
    assert "last-first  " in capsys.readouterr().out
    assert run(["schedule", "last-first", "--json", "--devices", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "last-first"
    assert "last-first" in {entry.schedule for entry in entries()}
    job = job_from(JOB)
    plan = Plan.of(job.parallel, ((0, 1), (2, 3)), job.train.batch)
    assert [str(task) for task in build_schedule(plan, job.train.batch).orders[0]][4:8] == [
        "0BW3",
        "0BW2",
        "0BW1",
        "0BW0",
    ]


def test_a_new_job_key_is_a_field_with_its_docstring() -> None:
    class MyTrainSpec(TrainSpec):
        """What a release with one key more has."""

        naps: Count = 0
        """Steps that the run sleeps."""

    class MyJobSpec(JobSpec):
        train: MyTrainSpec = Field()

    own = {**JOB, "parallel": {}}
    given = {**own, "train": {**JOB["train"], "naps": 3}}
    assert checked(given, MyJobSpec, "mine.yaml", "x.yaml").train.naps == 3
    assert "| `naps` | whole number >= 0 | `0` | Steps that the run sleeps. |" in keys_page("", {"train": MyTrainSpec})
    with pytest.raises(SpecError, match="give a whole number") as caught:
        checked({**own, "train": {**JOB["train"], "naps": "many"}}, MyJobSpec, "mine.yaml", "x.yaml")
    assert caught.value.where == "mine.yaml: train.naps"
    with pytest.raises(SpecError, match='did you mean "naps"'):
        checked({**own, "train": {**JOB["train"], "nap": 3}}, MyJobSpec, "mine.yaml", "x.yaml")


def squares(model: torch.nn.Module, batch: dict[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    return scale * (model(batch["x"]) - batch["labels"]).pow(2).mean(-1)


def test_a_new_loss_is_a_function_that_the_job_names() -> None:
    own = {"import": "tests.test_seams:last_first", "loss": "tests.test_seams:squares", "loss_args": {"scale": 2.0}}
    result = loss_function(ImportSpec.model_validate(own))
    assert result is not None
    batch = {"x": torch.ones(3, 2), "labels": torch.zeros(3, 2)}
    assert result(torch.nn.Identity(), batch).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(SpecError, match="it is called as loss"):
        loss_function(ImportSpec.model_validate({**own, "loss_args": {"size": 2.0}}))
