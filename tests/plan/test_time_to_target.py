"""Plans ranked by time to a target: the closed form with hand-made epochs, and what a table must say."""

from __future__ import annotations

import json

import pytest

from raypipe.cli import run
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.choose import Decision, choose
from raypipe.plan.hybrid import epochs_from, rank_batches
from tests.plan.conftest import make_job, make_profile

TABLE = {"epochs": {1: 4.0, 2: 4.2, 4: 8.0}, "batch": 4, "steps_per_epoch": 100, "target": 2.5, "lr": {1: 0.1, 4: 0.4}}
TARGET = {"early_stop": {"target": 2.5}, "eval_every": 10}


def test_time_to_target_is_step_time_times_steps_of_an_epoch_times_epochs() -> None:
    profile, kept = make_profile(layers=2, devices=2), {}

    def plan_for(job: JobSpec) -> Decision:
        batch = job.train.batch
        kept[batch] = kept.get(batch) or choose(job, profile, search_s=0, top=1)
        return kept[batch]

    result = rank_batches(make_job(layers=2, batch=8, **TARGET), epochs_from(TABLE), plan_for)
    closed = {}
    for batch, epochs in ((4, 4.0), (8, 4.2), (16, 8.0)):
        step_s = choose(make_job(layers=2, batch=batch), profile, search_s=0, top=1).best.step_s
        closed[batch] = step_s * (400 / batch) * epochs
    assert {one.batch: one.seconds for one in result.ranked} == pytest.approx(closed, rel=1e-12)
    assert [one.batch for one in result.ranked] == sorted(closed, key=closed.__getitem__)
    assert result.ranked[0].batch == 8  # the fastest per sample is the largest, whose epochs cost more than it gains
    assert {one.batch: one.lr for one in result.ranked} == {4: 0.1, 8: None, 16: 0.4}
    same = rank_batches(
        make_job(layers=2, batch=8, **TARGET), epochs_from(TABLE | {"epochs": {1: 4, 2: 4, 4: 4}}), plan_for
    )
    assert [one.batch for one in same.ranked] == [16, 8, 4]


def test_a_batch_without_a_plan_is_left_out_and_named() -> None:
    job = make_job(batch=8, parallel={"auto": True, "replicas": 4, "microbatch": 2}, **TARGET)
    result = rank_batches(job, epochs_from(TABLE), lambda one: choose(one, make_profile(), search_s=0))
    assert [one.batch for one in result.ranked] == [8, 16]
    assert "no plan on 4 devices" in result.left_out[4]
    none, alone = make_job(batch=8, parallel={"auto": True, "stages": 5}, **TARGET), epochs_from(TABLE)
    with pytest.raises(SpecError, match="no plan on 4 devices has stages: 5"):
        rank_batches(none, alone, lambda one: choose(one, make_profile(), search_s=0))


@pytest.mark.parametrize(
    ("table", "train", "message"),
    [
        ({}, {"batch": 12}, "says nothing about a batch of 12; it has 4, 8, 16"),
        ({}, {"early_stop": None}, "names no target"),
        ({}, {"early_stop": {"target": 2.4}}, "2.4, but the epochs were measured to 2.5"),
        ({"batch": None}, {}, "batch: missing"),
        ({"steps_per_epoch": None}, {}, "steps_per_epoch: missing"),
    ],
)
def test_what_the_table_or_the_job_lacks_is_one_error(table, train, message) -> None:
    job = make_job(**({"batch": 8} | TARGET | train))

    def never(job: JobSpec) -> Decision:
        raise AssertionError("nothing is planned")

    with pytest.raises(SpecError) as caught:
        rank_batches(job, epochs_from(TABLE | table), never)
    assert message in str(caught.value)


def test_autoconfigure_chooses_the_batch(tmp_path, capsys) -> None:
    job, table, profile, out = (tmp_path / name for name in ("job.yaml", "epochs.json", "profile.json", "plan.json"))
    job.write_text(json.dumps(make_job(batch=16, **TARGET).model_dump(mode="json", exclude_unset=True)))
    table.write_text(json.dumps(TABLE))
    profile.write_text(make_profile().model_dump_json())
    command = ["autoconfigure", str(job), "--profile", str(profile), "--search", "0", "--top", "1"]
    assert run([*command, "--epochs", str(table), "--json", "-o", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = told["time_to_target"]["batches"]
    assert rows[0]["batch"] == 8
    for row in rows:
        assert row["seconds"] == pytest.approx(row["predicted_step_s"] * 400 / row["batch"] * row["epochs"])
    assert told["best"]["made_for"]["train"]["batch"] == 8
    assert json.loads(out.read_text()) == told["best"]
    assert run([*command, "--epochs", str(table), "--devices", "4"]) == 0
    assert "set train.batch: 8" in capsys.readouterr().out
