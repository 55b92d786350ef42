"""Losses that the Trainer chooses by labels and arguments: several labels, values, smoothed labels; short steps too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raypipe
from raypipe.data import declared_fields, open_data
from raypipe.errors import SpecError
from raypipe.models import build_model
from raypipe.trainer.datasets import PadRows
from tests.exhaustive import crossed
from tests.trainer.test_given import summed
from tests.trainer.test_given_runs import outcome, trained
from tests.trainer.three_steps import (
    arguments,
    assert_alike,
    bert,
    degrees,
    hugging_face,
    mixed_losses,
    pipelined,
    plain,
    rows_of,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

G = torch.Generator().manual_seed(3)
LABELS: dict[str, list[Any]] = {
    "several": torch.randint(0, 2, (8, 4), generator=G).float().tolist(),
    "values": torch.randn(8, generator=G).tolist(),
    "whole": torch.randint(0, 3, (8,), generator=G).tolist(),
    "vectors": torch.randn(8, 3, generator=G).tolist(),
    "smooth": torch.randint(0, 3, (8,), generator=G).tolist(),
}
HEADS: dict[str, dict[str, Any]] = {
    "several": {"num_labels": 4}, "values": {"num_labels": 1}, "whole": {"num_labels": 1},
    "vectors": {"num_labels": 3, "problem_type": "regression"}, "smooth": {"num_labels": 3},
}  # fmt: skip
SMOOTHING = 0.1


def rows(case: str) -> list[dict[str, Any]]:
    return [{**row, "labels": label} for row, label in zip(rows_of(), LABELS[case], strict=True)]


def loss_of(case: str, given: list[dict[str, Any]]) -> Callable[[nn.Module], Tensor]:
    """Return the loss as PyTorch has it, of logits alone."""
    batch = {name: torch.tensor([row[name] for row in given]) for name in ("input_ids", "attention_mask")}
    labels = torch.tensor([row["labels"] for row in given])
    if case != "smooth":
        labels = labels.double()

    def loss(model: nn.Module) -> Tensor:
        logits = model(**batch).logits
        if case == "several":
            return F.binary_cross_entropy_with_logits(logits, labels)
        if case == "smooth":
            return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
        return F.mse_loss(logits.reshape(labels.shape), labels)

    return loss


def fields_of(case: str) -> dict[str, Any]:
    return {"label_smoothing_factor": SMOOTHING} if case == "smooth" else {}


SMOOTH = fields_of("smooth")


@pytest.mark.parametrize(("case", "schedule"), crossed(list(HEADS), ["1f1b", "zb-h1"]))
def test_three_steps_are_the_trainers(case: str, schedule: str, tmp_path: Path) -> None:
    given, fields = rows(case), fields_of(case)
    mine = pipelined(bert(**HEADS[case]), given, tmp_path / "run", 8, split=schedule == "zb-h1", fields=fields)
    assert_alike(mine, plain(bert(**HEADS[case]), loss_of(case, given)), 1e-9)
    if mixed_losses() or case in ("several", "smooth"):
        assert_alike(mine, hugging_face(bert(**HEADS[case]), given, tmp_path / "hf", 8, fields=fields), 1e-7)
    assert len(set(mine.losses)) == 3


@pytest.mark.runs
@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.usefixtures("driver")
def test_runs_train_the_same(case: str, schedule: str, tmp_path: Path) -> None:
    model, given = bert(**HEADS[case]), rows(case)
    made = trained(model, tmp_path / "run", schedule, rows=given, fields=fields_of(case))
    assert_alike(outcome(tmp_path / "run", model), plain(bert(**HEADS[case]), loss_of(case, given)), 1e-9)
    with torch.no_grad():
        right = loss_of(case, given)(model).item()
    assert made.evaluate()["eval_loss"] == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("case", HEADS)
def test_a_short_mini_batch_counts_its_own_rows(case: str, tmp_path: Path) -> None:
    """Six rows in mini-batches of four: the second has two rows, and two places that no row fills."""
    args = arguments(tmp_path / "run", 4, 1, train_sampling_strategy="sequential", **fields_of(case))
    given = rows(case)[:6]
    with degrees(pp=2):
        made = raypipe.PipelineTrainer(
            model=bert(**HEADS[case]), args=args, train_dataset=given, eval_dataset=given[:2],
            job={"train": {"dtype": "float64"}},
        ).prepare()  # fmt: skip
    task = build_model(made.job, declared_fields(made.job.data)).task
    short = open_data(tmp_path / "run" / "data", task).batch("train", 1, 1, 4)
    logits = torch.randn(4, HEADS[case]["num_labels"], dtype=torch.float64, generator=G, requires_grad=True)
    mean = task.loss(logits, short) / task.targets(short)
    mean.backward()

    class Head(nn.Module):
        def forward(self, **_: Any) -> Any:
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=own)

    own = logits.detach()[:2].requires_grad_()
    right = loss_of(case, given[4:6])(Head())
    right.backward()
    assert mean.item() == pytest.approx(right.item(), abs=1e-9)
    torch.testing.assert_close(logits.grad[:2], own.grad, rtol=0, atol=1e-9)
    assert not logits.grad[2:].any()


class Own(nn.Module):
    """A module of the script with logits, whose own loss is another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.m, self.h = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.config = transformers.PretrainedConfig()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.h(torch.tanh(self.m(torch.tanh(self.e(input_ids).mean(1)))))
        return {"logits": logits} if labels is None else {"loss": logits.square().mean(), "logits": logits}


def smoothed_mean(model: nn.Module) -> Tensor:
    given = rows("smooth")
    logits = model(input_ids=torch.tensor([row["input_ids"] for row in given]))["logits"]
    labels = torch.tensor([row["labels"] for row in given])
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def test_a_module_of_the_script_is_smoothed_too(tmp_path: Path) -> None:
    given = [{name: row[name] for name in ("input_ids", "labels")} for row in rows("smooth")]
    mine = pipelined(Own().double(), given, tmp_path / "run", 8, fields=SMOOTH)
    assert_alike(mine, plain(Own().double(), smoothed_mean), 1e-9)
    assert_alike(mine, hugging_face(Own().double(), given, tmp_path / "hf", 8, fields=SMOOTH), 1e-7)


def half(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """Reads the trainer's label_smoother."""
    labels = inputs.pop("labels")
    return 0.5 * self.label_smoother(model(**inputs), labels)


def test_compute_loss_may_call_the_label_smoother(tmp_path: Path) -> None:
    kind = type("Half", (raypipe.PipelineTrainer,), {"compute_loss": half})
    given = rows("smooth")
    mine = pipelined(bert(), given, tmp_path / "run", 8, trainer=kind, fields=SMOOTH)
    theirs = type("Theirs", (transformers.Trainer,), {"compute_loss": half})
    assert_alike(mine, hugging_face(bert(), given, tmp_path / "hf", 8, trainer=theirs, fields=SMOOTH), 1e-7)


def test_compute_loss_func_goes_before_smoothing_as_there(tmp_path: Path) -> None:
    given, more = rows("smooth"), {"compute_loss_func": summed, "fields": SMOOTH}
    mine = pipelined(bert(), given, tmp_path / "run", 8, **more)
    assert_alike(mine, hugging_face(bert(), given, tmp_path / "hf", 8, **more), 1e-7)


def gpt2() -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=5, n_embd=16, n_head=2, n_layer=2, n_positions=32, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def ragged() -> list[dict[str, Any]]:
    result = [[token % 5 for token in row["input_ids"][: 10 - k % 4]] for k, row in enumerate(rows_of())]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *ids[1:]]} for ids in result]


def test_a_causal_models_labels_are_shifted_and_counted_over_the_mini_batch(tmp_path: Path) -> None:
    """Rows of unequal length in four micro-batches, against the Trainer's accumulation and a loop over rows."""

    def by_rows(model: nn.Module) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in ragged():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
            labels = torch.tensor(row["labels"][1:])
            total = total + F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
            count += len(labels)
        return total / count

    mine = pipelined(gpt2(), ragged(), tmp_path / "run", 2, 4, job={"parallel": {"microbatch": 2}}, fields=SMOOTH)
    assert_alike(mine, plain(gpt2(), by_rows), 1e-9)
    theirs = hugging_face(gpt2(), ragged(), tmp_path / "hf", 2, 4, data_collator=PadRows(0), fields=SMOOTH)
    assert_alike(mine, theirs, 1e-7)


def vit(**head: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **head,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).double()


@pytest.mark.parametrize("case", ["several", "values"])
def test_heads_of_images_too(case: str, tmp_path: Path) -> None:
    images = torch.randn(8, 3, 8, 8, generator=G, dtype=torch.float64)
    given = [{"pixel_values": x.numpy(), "labels": label} for x, label in zip(images, LABELS[case], strict=True)]
    labels = torch.tensor(LABELS[case]).double()

    def loss(model: nn.Module) -> Tensor:
        logits = model(pixel_values=images).logits
        return (
            F.binary_cross_entropy_with_logits(logits, labels) if case == "several"
            else F.mse_loss(logits.squeeze(-1), labels)
        )  # fmt: skip

    mine = pipelined(vit(**HEADS[case]), given, tmp_path / "run", 8)
    assert_alike(mine, plain(vit(**HEADS[case]), loss), 1e-9)
    if mixed_losses() or case == "several":
        assert_alike(mine, hugging_face(vit(**HEADS[case]), given, tmp_path / "hf", 8), 1e-7)


@pytest.mark.parametrize(
    ("head", "label", "says"),
    [
        ({"num_labels": 4}, 1.5, r"float64 of shape \[rows\], .* learns 4 labels a row"),
        ({"num_labels": 4}, [0.0, 1.0, 1.0], r"float64 of shape \[rows, 3\]"),
        ({"num_labels": 4}, [0, 1, 1, 0], r"int64 of shape \[rows, 4\], .* one of 4 classes"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, [0, 1, 1, 0], "int64 .* 4 labels"),
        ({"num_labels": 4, "problem_type": "single_label_classification"}, 1.0, "float64 .* one of 4 classes"),
        ({"num_labels": 1}, [0.5, 0.5], "one number a row"),
        ({"num_labels": 3, "problem_type": "regression"}, 0.5, "3 numbers a row"),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_name(
    head: dict[str, Any], label: Any, says: str, tmp_path: Path
) -> None:
    given = [{**row, "labels": label} for row in rows_of()]
    with pytest.raises(SpecError, match=says):
        pipelined(bert(**head), given, tmp_path / "run", 8)


def test_labels_that_are_not_a_number_are_refused(tmp_path: Path) -> None:
    given = rows("values")
    given[3]["labels"] = float("nan")
    with pytest.raises(SpecError, match="labels of row 3 are not a number"):
        pipelined(bert(num_labels=1), given, tmp_path / "run", 8)


def test_smoothing_is_refused_where_labels_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train\.label_smoothing: 0\.1 is a share"):
        pipelined(bert(num_labels=1), rows("values"), tmp_path / "run", 8, fields=SMOOTH)
