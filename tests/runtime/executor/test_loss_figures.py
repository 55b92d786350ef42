"""Figures that a loss function returns beside its loss, against the eager model on the whole validation; float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.checkpoint import best
from raypipe.data import open_data
from raypipe.errors import SpecError
from raypipe.models import build_model
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.train import prepare_run
from raypipe.trained import fill
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.small_runs import drive
from tests.runtime.runs.test_any_model import fields_of
from tests.runtime.runs.test_loss_functions import BATCH, Batch, Writer, job_of, pairs, texts, vectors
from tests.runtime.runs.test_loss_functions import HERE as LOSSES
from tests.runtime.runs.test_own_losses import HERE as DETECTION
from tests.runtime.runs.test_own_losses import matched, pictures

HERE = "tests.runtime.executor.test_loss_figures"
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
