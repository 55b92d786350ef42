"""Figures of a validation: all predictions of the run's devices, as one process computes them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.checkpoint import best
from raypipe.data import open_data
from raypipe.errors import SpecError
from raypipe.models import build_model, random_keys
from raypipe.models.task import NextToken
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.early_stop import Patience, score
from raypipe.runtime.executor.metrics import MicrobatchPredictions, Predictions, ValidationMetrics, together
from raypipe.train import prepare_run
from raypipe.trained import fill, load_body
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.small_runs import drive, small_job
from tests.runtime.runs.test_any_model import fields_of
from tests.runtime.runs.test_loss_functions import BATCH, Batch, Writer, job_of, pairs, texts, vectors
from tests.runtime.runs.test_loss_functions import HERE as LOSSES
from tests.runtime.runs.test_own_losses import HERE as DETECTION
from tests.runtime.runs.test_own_losses import matched, pictures

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


# Figures that a loss function returns beside its loss, against the eager model on the whole validation; float64.


Returned = tuple[Tensor, Mapping[str, Any]]


def classified(model: Any, batch: Batch) -> Returned:
    """One loss and one figure of each kind a sample."""
    logits = model(batch["features"])["logits"]
    hits = logits.argmax(-1) == batch["labels"]
    return F.cross_entropy(logits, batch["labels"], reduction="none"), {"accuracy": hits, "largest": logits.amax(-1)}


def written(model: Any, batch: Batch) -> Returned:
    """One loss and one figure a label; -100 counts in neither."""
    logits = model(batch["input_ids"])
    each = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return each, {"accuracy": logits.argmax(-1) == batch["labels"], "entropy": -logits.log_softmax(-1).mean(-1)}


def averaged(model: Any, batch: Batch) -> Returned:
    logits = model(batch["features"])["logits"]
    return F.cross_entropy(logits, batch["labels"]), {"spread": logits.std()}


def detected(model: Any, batch: Batch) -> Returned:
    """A loss that looks at values, and so runs as it is."""
    loss = matched(model, batch)
    return loss, {"half": loss / 2}


def one_figure_for_all(model: Any, batch: Batch) -> Returned:
    loss, _ = classified(model, batch)
    return loss, {"mean": loss.mean()}


def of_no_tensor(model: Any, batch: Batch) -> Returned:
    return classified(model, batch)[0], {"mean": 3.0}


def three_things(model: Any, batch: Batch) -> Any:
    loss, figures = classified(model, batch)
    return loss, figures, loss


def two_in_a_name(model: Any, batch: Batch) -> Returned:
    return classified(model, batch)[0], {"a,b": batch["labels"]}


def of_others(model: Any, batch: Batch) -> Returned:
    loss, _ = classified(model, batch)
    return loss, {"mean": loss.mean().expand_as(loss)}


CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor], Any]] = {
    "a sample": ({"import": f"{LOSSES}:Net", "loss": f"{HERE}:classified"}, vectors(), classified),
    "a label": ({"import": f"{LOSSES}:Writer", "loss": f"{HERE}:written"}, texts(), written),
    "a micro-batch": (
        {"import": f"{LOSSES}:Net", "loss": f"{HERE}:averaged", "loss_per": "microbatch"}, vectors(), averaged,
    ),
    "as it is": ({"import": f"{DETECTION}:Detector", "loss": f"{HERE}:detected"}, pictures(), detected),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_last_stage_has_loss_and_figures(case: str) -> None:
    spec, rows, plain = CASES[case]
    model = build_model(job_of(spec), fields_of(rows))
    body = model.build_stage(range(model.count), 3)
    module = with_values(model.values.build(), {n: p.detach() for n, p in body.named().items()})
    loss, figures = plain(module, rows)
    assert model.task.figures == tuple(figures)
    (output,) = body((), rows)
    counted = rows["labels"] != -100 if case == "a label" else torch.ones(loss.shape, dtype=torch.bool)
    share = BATCH if case == "a micro-batch" else 1  # the runtime divides by the samples
    assert model.task.loss(output, rows).item() == pytest.approx(share * loss[counted].sum().item(), abs=1e-9)
    sums = [share * figure[counted].double().sum().item() for figure in figures.values()]
    assert model.task.sums_of_figures(output, rows).tolist() == pytest.approx(sums, abs=1e-6)
    assert build_model(job_of(spec), fields_of(rows)).task.figures == tuple(figures)  # from the cache


REFUSED = {
    one_figure_for_all: r"the figure mean is \[\], the loss \[2\]",
    of_no_tensor: r"the figure mean is a float, the loss \[2\]",
    three_things: "returns a tuple",
    two_in_a_name: "named 'a,b'",
    of_others: "depends on other samples",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_figures_of_another_shape_are_refused(function: Any) -> None:
    spec = {"import": f"{LOSSES}:Net", "loss": f"{HERE}:{function.__name__}"}
    with pytest.raises(SpecError, match=REFUSED[function]) as caught:
        build_model(job_of(spec), fields_of(vectors()))
    assert caught.value.fix


def test_the_best_is_named_by_one_of_the_figures(tmp_path) -> None:
    np.savez(tmp_path / "rows.npz", **{name: torch.cat([t] * 4).numpy() for name, t in vectors().items()})

    def check(loss: str, metric: str) -> None:
        job = job_of({"import": f"{LOSSES}:Net", "loss": loss}, str(tmp_path / "rows.npz"), stages=2)
        job = job.model_copy(update={"train": job.train.model_copy(update={"best_metric": metric})})
        prepare_run(job, tmp_path / "run", resume=False)

    with pytest.raises(SpecError, match="acuracy is not among the figures of the loss function, accuracy, largest"):
        check(f"{HERE}:classified", "acuracy")
    with pytest.raises(SpecError, match="no function computes figures"):
        check(f"{LOSSES}:weighted", "accuracy")
    check(f"{HERE}:classified", "accuracy")


def plain_rewards(model: Any, rows: Batch, beta: float) -> dict[str, list[float]]:
    """DPO's implicit rewards, text by text and token by token."""
    rewards: dict[str, list[float]] = {}
    for kind in ("chosen", "rejected"):
        for ids, labels, known in zip(
            rows[f"{kind}_input_ids"], rows[f"{kind}_labels"], rows[f"reference_{kind}_logps"], strict=True
        ):  # fmt: skip
            every = model(ids[None])[0].log_softmax(-1)
            own = sum(every[t, labels[t + 1]].item() for t in range(len(ids) - 1) if labels[t + 1] != -100)
            rewards.setdefault(kind, []).append(beta * (own - known.item()))
    return rewards


@pytest.mark.runs
def test_a_run_with_dpo_logs_its_rewards(stage_pool, tmp_path) -> None:
    rows = {name: torch.cat([t, t.flip(0), t, t.flip(0)]) for name, t in pairs(True).items()}
    np.savez(tmp_path / "rows.npz", **{name: t.numpy() for name, t in rows.items()})
    spec = {"import": f"{LOSSES}:Writer", "loss": "dpo", "loss_args": {"beta": 0.3}}
    job = job_of(spec, str(tmp_path / "rows.npz"), schedule="zb-h1", stages=2, replicas=2, microbatch=1)
    asked = {
        "steps": 3, "eval_every": 1, "eval_batches": 1, "best_metric": "rewards/margins", "best_is": "highest",
        "load_best_at_end": True,
    }  # fmt: skip
    job = job.model_copy(update={"train": job.train.model_copy(update=asked)})
    drive(job, stage_pool, tmp_path / "run")
    result = [row for row in read_rows(tmp_path / "run" / METRICS) if "val_loss" in row]
    assert len(result) == 3
    (tmp_path / "run" / RECORD).write_text(job.model_dump_json())
    kept = best(tmp_path / "run" / "checkpoints")
    assert kept is not None
    top = max(result, key=lambda row: row["val_rewards/margins"])
    assert kept.step == top["step"]
    module = Writer().double()
    fill(module, tmp_path / "run", job)  # the best checkpoint's
    task = build_model(job, fields_of(rows)).task
    batch = open_data(tmp_path / "run" / "data", task).batch("val", job.train.seed, 0, BATCH)
    rewards = plain_rewards(module, batch, 0.3)
    margins = np.subtract(rewards["chosen"], rewards["rejected"])
    plain = {
        "chosen": np.mean(rewards["chosen"]), "rejected": np.mean(rewards["rejected"]), "margins": margins.mean(),
        "accuracies": (margins > 0).mean(),
    }  # fmt: skip
    for name, value in plain.items():
        assert top[f"val_rewards/{name}"] == pytest.approx(value, abs=1e-9, rel=0), name
