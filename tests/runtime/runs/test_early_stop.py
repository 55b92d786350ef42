"""Early stop: where it stops is a brute-force reading of the losses, and what it leaves is the undisturbed run's."""

from __future__ import annotations

import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.checkpoint import best, forget_best, keep_best, latest, open_checkpoint, outcome
from raypipe.errors import SpecError
from raypipe.job.train_spec import EarlyStopSpec, TrainSpec
from raypipe.launch.run_directory import check_resume
from raypipe.observe.run_log import EVENTS, RunLog, read_rows, rewind
from raypipe.observe.run_record import summarise, summary_lines
from raypipe.runtime.early_stop import Patience, patience_of
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, small_job

LOSSES = st.lists(st.sampled_from([1.0, 1.5, 2.0, 2.25, 3.0, math.nan]), min_size=1, max_size=12)


def stops_at(losses: list[float], patience: int, min_delta: float = 0.0) -> int | None:
    """Validations until the stop, straight from the definition: the last ``patience`` ones beat no earlier record."""
    records = [math.inf]
    improved = [0]
    for number, loss in enumerate(losses, 1):
        if records[-1] - loss > min_delta:
            records.append(loss)
            improved.append(number)
    for one, following in pairwise([*improved, len(losses) + patience + 1]):
        if following - one > patience:
            return one + patience if one + patience <= len(losses) else None
    return None


def first_exhausted(losses: list[float], spec: EarlyStopSpec) -> int | None:
    patience = Patience(TrainSpec(steps=1, batch=1, early_stop=spec))
    for number, loss in enumerate(losses, 1):
        patience.saw(number, loss)
        if patience.exhausted:
            return number
    return None


@settings(deadline=None)
@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 0.25, 0.75]))
def test_it_stops_after_so_many_validations_without_an_improvement(losses, patience, min_delta) -> None:
    spec = EarlyStopSpec(patience=patience, min_delta=min_delta)
    assert first_exhausted(losses, spec) == stops_at(losses, patience, min_delta)


@settings(deadline=None)
@given(LOSSES, st.sampled_from([0.5, 1.0, 2.1]), st.sampled_from([None, 2]))
def test_it_stops_at_the_first_validation_at_or_below_the_target(losses, target, patience) -> None:
    first = next((number for number, loss in enumerate(losses, 1) if loss <= target), None)
    ends = [n for n in (first, stops_at(losses, patience) if patience else None) if n is not None]
    assert first_exhausted(losses, EarlyStopSpec(target=target, patience=patience)) == min(ends, default=None)


@settings(deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=12), st.integers(1, 4))
def test_it_stops_where_transformers_does(losses, patience) -> None:
    transformers = pytest.importorskip("transformers")
    callback = transformers.EarlyStoppingCallback(patience)
    args = SimpleNamespace(greater_is_better=False)
    theirs, lowest = None, None
    for number, loss in enumerate(losses, 1):
        callback.check_metric_value(args, SimpleNamespace(best_metric=lowest), None, loss)
        lowest = loss if lowest is None else min(lowest, loss)
        if callback.early_stopping_patience_counter >= patience:
            theirs = number
            break
    assert first_exhausted(losses, EarlyStopSpec(patience=patience)) == theirs


def test_small_steps_down_add_up() -> None:
    spec = EarlyStopSpec(patience=2, min_delta=0.1)
    assert first_exhausted([3.0, 2.95, 2.88, 2.82, 2.77, 2.7], spec) is None
    assert first_exhausted([3.0, 2.95, 2.91, 2.5], spec) == 3


STEPS, EVERY = 16, 2
# So fast that it soon makes things worse.
HASTY = {"steps": STEPS, "lr": 0.08, "eval_every": EVERY, "checkpoint_every": EVERY, "eval_batches": 2}


def parameters(path) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(path)
    return saved.read(saved.keys)


@pytest.mark.runs
@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive("pipedream-2bw")])
def test_a_run_stops_with_the_parameters_that_were_validated(schedule, stage_pool, text_folder, tmp_path) -> None:
    parallel = {"schedule": schedule, "stages": 2}
    whole = drive(small_job(text_folder, parallel, **HASTY), stage_pool, tmp_path / "whole")
    patience = 2
    count = stops_at(whole.val_losses, patience)
    assert count is not None, whole.val_losses
    stop = count * EVERY
    assert stop < STEPS
    lowest = 1 + min(range(count), key=lambda i: whole.val_losses[i])

    # Checkpoints are left to the early stop: none is due before the end.
    changed = HASTY | {"checkpoint_every": 0, "early_stop": {"patience": patience}}
    job = small_job(text_folder, parallel, **changed)
    directory = tmp_path / "stopped"
    done = drive(job, stage_pool, directory)
    assert done.losses == whole.losses[:stop]
    assert done.val_losses == whole.val_losses[:count]
    assert max(done.checkpoints) == stop
    wanted = parameters(whole.checkpoints[stop])
    found = parameters(done.checkpoints[stop])
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    events = read_rows(directory / EVENTS)
    assert [e["step"] for e in events if e["event"] == "early_stop"] == [stop]

    # The best one stays when its numbered checkpoint goes.
    root = directory / "checkpoints"
    shutil.rmtree(done.checkpoints[lowest * EVERY])
    held = best(root, verify=True)
    assert held.step == lowest * EVERY
    assert held.meta["val_loss"] == whole.val_losses[lowest - 1]
    wanted = parameters(whole.checkpoints[held.step])
    assert all(torch.equal(held.read([key])[key], value) for key, value in wanted.items())
    assert outcome(root, best_one=True)[0].name == f"best-{held.step:08d}"
    assert outcome(root, best_one=False) == latest(root) == (done.checkpoints[stop], [])

    log = RunLog(directory)
    log.event("run", resume=False)
    with pytest.raises(SpecError, match=f"(?s)stopped early after {stop} steps.*to train on"):
        check_resume(job, directory)

    # Begun again from an earlier checkpoint, it stops at the same step: it remembers what it had waited.
    again = tmp_path / "again"
    middle = stop - EVERY
    rewound = drive(small_job(text_folder, parallel, **changed | {"steps": middle}), stage_pool, again)
    rewind(again, middle)
    assert patience_of(again, job.train, middle).waited == patience - 1
    on = drive(job, stage_pool, again, rewound.checkpoints[middle], middle)
    assert max(on.checkpoints) == stop
    assert on.losses == whole.losses[:stop]

    # With a target it stops at the first validation that reaches it.
    target = {"checkpoint_every": 0, "early_stop": {"target": whole.val_losses[0]}}
    reached = drive(small_job(text_folder, parallel, **HASTY | target), stage_pool, tmp_path / "reached")
    assert (max(reached.checkpoints), reached.losses) == (EVERY, whole.losses[:EVERY])


@pytest.mark.slow
def test_the_best_is_replaced_and_forgotten(tmp_path) -> None:
    from raypipe.checkpoint import commit, step_directory, write_shard

    for step in (2, 4):
        path = step_directory(tmp_path, step)
        path.mkdir()
        shard = write_shard(path, "rank-00000", {"param/w": torch.full((3,), float(step))})
        commit(path, step, [shard], {"val_loss": 1.0 / step})
        keep_best(tmp_path, path)
    assert [p.name for p in sorted(tmp_path.glob("best*"))] == ["best", "best-00000004"]
    held = best(tmp_path, verify=True)
    assert (held.step, held.meta["val_loss"]) == (4, 0.25)
    # No second copy of the data.
    assert (held.path / "rank-00000.safetensors").samefile(step_directory(tmp_path, 4) / "rank-00000.safetensors")
    forget_best(tmp_path)
    assert best(tmp_path) is None
    assert not list(tmp_path.glob("best*"))
    assert latest(tmp_path)[0] == step_directory(tmp_path, 4)
    assert outcome(tmp_path, best_one=True) == latest(tmp_path)


def test_the_summary_says_so(tmp_path) -> None:
    log = RunLog(tmp_path)
    log.event("run", resume=False)
    log.event("started", devices=[], resumed_from=None)
    row = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "step_s": 0.1, "tokens_per_s": 10.0, "bubble_ratio": 0.1}
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.75)):
        log.metric({"step": step, **row})
        log.metric({"step": step, "val_loss": loss})
        log.event("checkpoint", step=step, path="x", best=step < 3)
    log.event("early_stop", step=3, message="validation has not improved")
    result = summarise(tmp_path, {"schedule": "1f1b", "stages": 2, "replicas": 1, "microbatch": 4})
    assert result["best"] == {"step": 2, "val_loss": 2.5}
    assert result["stopped_early"] == "validation has not improved"
    lines = summary_lines(result)
    assert "best checkpoint  step 2, validation loss 2.5000" in lines
    assert "stopped early    validation has not improved" in lines


@pytest.mark.parametrize("key", [{"early_stop": {"patience": 2}}, {"load_best_at_end": True}])
def test_something_must_be_validated(key, text_folder) -> None:
    with pytest.raises(SpecError, match=r"set train\.eval_every"):
        small_job(text_folder, {"schedule": "1f1b", "stages": 2}, **key)
