"""Figures of a validation: all predictions of the run's devices, as one process computes them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.checkpoint import best
from raypipe.data import open_data
from raypipe.errors import SpecError
from raypipe.models import random_keys
from raypipe.models.task import NextToken
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.early_stop import Patience, score
from raypipe.runtime.executor.metrics import MicrobatchPredictions, Predictions, ValidationMetrics, together
from raypipe.trained import load_body
from tests.runtime.runs.small_runs import drive, small_job

HERE = "tests.runtime.executor.test_metrics"
SEEN: list[Predictions] = []


def figures(found: Predictions) -> dict[str, Any]:
    """As a user writes it for transformers: the arrays unpacked, NumPy's numbers returned."""
    SEEN.append(found)
    logits, labels = found
    guessed = logits.argmax(-1) if logits.ndim > labels.ndim else logits
    return {"accuracy": (guessed == labels).mean(), "val_mean": np.float32(guessed.mean())}


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel",
    [
        {"schedule": "zb-v", "stages": 2, "replicas": 2},
        {"schedule": "chimera", "stages": 2},
        {"stages": 2, "tensor": 2},
    ],
    ids=["zb-v", "chimera", "tensor"],
)
def test_predictions_are_those_of_one_process(parallel, stage_pool, text_folder, tmp_path) -> None:
    train = {"steps": 3, "eval_every": 2, "eval_batches": 2, "metrics": f"{HERE}:figures", "best_metric": "accuracy"}
    job = small_job(text_folder, {"microbatch": 2, **parallel}, **train, best_is="highest", load_best_at_end=True)
    seen = import_module(HERE).SEEN  # pytest imports this file by another name
    seen.clear()
    drive(job, stage_pool, tmp_path)
    rows = [row for row in read_rows(tmp_path / METRICS) if "val_loss" in row]
    assert [row["step"] for row in rows] == [2, 3]
    (tmp_path / RECORD).write_text(job.model_dump_json())
    kept = best(tmp_path / "checkpoints")
    assert kept is not None
    top = max(rows, key=lambda row: row["val_accuracy"])
    assert kept.step == top["step"]
    assert kept.meta["val_loss"] == top["val_loss"]
    assert kept.meta["score"] == ["accuracy", -top["val_accuracy"]]

    _, body = load_body(tmp_path)  # the best checkpoint's
    task = NextToken()
    data = open_data(tmp_path / "data", task)
    batches = [data.batch("val", 0, k, job.train.batch) for k in range(2)]
    inputs = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    with torch.no_grad(), random_keys(0, 0, [], training=False):
        (logits,) = body((), inputs)
    result = seen[rows.index(top)]
    assert result.predictions.dtype == np.float64
    assert result.predictions == pytest.approx(logits.numpy(), abs=1e-9, rel=0)
    assert (result.label_ids == inputs["shift_labels"].numpy()).all()
    guessed = logits.argmax(-1)
    assert top["val_accuracy"] == pytest.approx(float((guessed == inputs["shift_labels"]).double().mean()))
    assert top["val_mean"] == pytest.approx(float(guessed.double().mean()))


def preprocess_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Belongs to ``figures`` in a job: only the likeliest class leaves the device."""
    assert logits.shape[:-1] == labels.shape
    return logits.argmax(-1) if logits.shape[-1] == 3 else logits


def kept(samples: list[int], predictions: Any, labels: Any) -> MicrobatchPredictions:
    return MicrobatchPredictions(tuple(samples), np.asarray(predictions), np.asarray(labels))


def test_samples_come_in_the_order_of_their_rows() -> None:
    """Batches of four, micro-batches of two that ended in another order, three rows that all come again."""
    places = [2, 0, 1, 1, 0, 2, 2, 1]
    first = [kept([2, 3], [[1.0], [1.5]], [1, 1]), kept([0, 1], [[2.0], [0.0]], [2, 0])]
    second = [kept([0, 1, 2, 3], [[9.0]] * 4, [9] * 4)]
    result = together([first, second], 4, places)
    assert result.predictions.tolist() == [[0.0], [1.0], [2.0]]
    assert result.label_ids.tolist() == [0, 1, 2]
    assert together([first], 4, None).label_ids.tolist() == [2, 0, 1, 1]


def test_rows_of_two_lengths_are_padded_with_ignored_labels() -> None:
    parts = [kept([0], [[[0.5, 0.5]]], [[4]]), kept([1], [[[1.0, 2.0], [3.0, 4.0]]], [[5, 6]])]
    result = together([parts], 2, None)
    assert result.label_ids.tolist() == [[4, -100], [5, 6]]
    assert result.predictions[0].tolist() == [[0.5, 0.5], [-100, -100]]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p: 1 / 0, "ZeroDivisionError.*predictions \\[1, 2\\], label_ids \\[1\\]"),
        (lambda p: 0.5, "returned a float.*as a dict"),
        (lambda p: {"confusion": [[1, 0], [0, 1]]}, "returned confusion of type list"),
    ],
)
def test_functions_that_return_no_figures(function, words, tmp_path) -> None:
    job = small_job(tmp_path, {"stages": 1, "microbatch": 1}, batch=1)
    with pytest.raises(SpecError, match=f"(?s)train.metrics.*{words}"):
        ValidationMetrics(function).of([[kept([0], [[1.0, 2.0]], [1])]], job, tmp_path)


def test_the_best_is_what_the_job_says(text_folder: Path) -> None:
    def train(**keys: Any) -> Any:
        return small_job(text_folder, {"stages": 1}, eval_every=1, **keys).train

    row = {"step": 3, "val_loss": 2.0, "val_accuracy": 0.75}
    assert score(train(), row) == 2.0
    assert score(train(best_metric="accuracy", best_is="highest"), row) == -0.75
    with pytest.raises(SpecError, match=r"accurracy is not among .* loss, accuracy"):
        score(train(best_metric="accurracy"), row)
    patience = Patience(train(best_metric="accuracy", best_is="highest", early_stop={"patience": 2, "target": 0.9}))
    for step, accuracy in enumerate([0.5, 0.4, 0.6, 0.6, 0.5], 1):
        assert not patience.exhausted
        patience.saw(step, -accuracy)
    assert str(patience) == "accuracy has not improved in 2 validations since step 3, when it was 0.6000"
    patience.saw(6, -0.9)
    assert str(patience) == "accuracy of 0.9000 after step 6 has reached its target"
