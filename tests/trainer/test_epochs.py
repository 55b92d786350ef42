"""Which rows a step reads: those that transformers' Trainer takes, by its samplers or a subclass's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raypipe
from raypipe.data import declared_fields, open_data
from raypipe.data.arrays import Arrays
from raypipe.errors import SpecError
from raypipe.models import build_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS = [{"input_ids": [1 + k] * (2 + k % 4), "attention_mask": [1] * (2 + k % 4), "labels": k % 3} for k in range(10)]


def arguments(out: Path, **more: Any) -> Any:
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "seed": 1, "report_to": "none", "use_cpu": True,
             "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, **more}  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(out), **given)


class Reads(nn.Module):
    """Remembers the first token of each row that it is trained on, which is the row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.read: list[list[int]] = []

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
        self.read.append((input_ids[:, 0] - 1).tolist())
        return {"loss": self.weight.sum() * 0.0}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from raypipe.trainer.datasets import PadRows

    return PadRows(0)(rows)


def trainers_rows(out: Path, mixin: type | None, **more: Any) -> list[list[int]]:
    """Return the rows of each step of transformers' Trainer."""
    model = Reads()
    kind = type("Theirs", (*([mixin] if mixin else []), transformers.Trainer), {})
    made = kind(model=model, args=arguments(out, **more), train_dataset=ROWS, data_collator=padded)
    with contextlib.redirect_stdout(None):
        made.train()
    gas = int(more.get("gradient_accumulation_steps", 1))
    per_epoch = len(made.get_train_dataloader())
    found, read = [], list(model.read)
    while read:
        epoch, read = read[:per_epoch], read[per_epoch:]
        found += [[row for one in epoch[k : k + gas] for row in one] for k in range(0, len(epoch), gas)]
    return found


def model() -> Any:
    transformers.set_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def prepared(out: Path, mixin: type | None = None, **more: Any) -> Any:
    raypipe.init(pp=2)
    try:
        kind = type("Mine", (*([mixin] if mixin else []), raypipe.PipelineTrainer), {})
        return kind(model=model(), args=arguments(out, **more), train_dataset=ROWS, eval_dataset=ROWS[:2]).prepare()
    finally:
        raypipe.init()


class Backwards:
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return list(reversed(range(10)))


class Weighted:
    def get_train_dataloader(self) -> Any:
        sampler = torch.utils.data.SequentialSampler(self.train_dataset)
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, sampler=sampler, collate_fn=padded)


@pytest.mark.parametrize(
    ("more", "mixin"),
    [
        ({}, None), ({"dataloader_drop_last": True}, None), ({"train_sampling_strategy": "group_by_length"}, None),
        ({"train_sampling_strategy": "sequential"}, None), ({"data_seed": 9}, None), ({"num_train_epochs": 1.5}, None),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, None), ({"max_steps": 7}, None),
        ({}, Backwards), ({}, Weighted),
    ],
)  # fmt: skip
def test_steps_read_the_trainers_rows(tmp_path: Path, more: dict[str, Any], mixin: type | None) -> None:
    theirs = trainers_rows(tmp_path / "theirs", mixin, **more)
    job = prepared(tmp_path / "mine", mixin, **more).job
    arrays = Arrays.open(tmp_path / "mine" / "data")
    assert job.train.steps == len(theirs)
    for step, rows in enumerate(theirs):
        none = arrays.repeats("train", step, job.train.batch)
        own = arrays.places("train", 1, step, job.train.batch)
        assert own[: len(rows)] == rows
        assert (0 if none is None else int(none.sum())) == job.train.batch - len(rows)


def test_a_short_mini_batch_counts_its_own_rows(tmp_path: Path) -> None:
    job = prepared(tmp_path / "run").job
    task = build_model(job, declared_fields(job.data)).task
    data = open_data(tmp_path / "run" / "data", task)
    assert [task.targets(data.batch("train", 1, step, 4)) for step in range(6)] == [4, 4, 2, 4, 4, 2]


def test_a_run_of_more_steps_goes_on_in_the_same_order(tmp_path: Path) -> None:
    first = prepared(tmp_path / "run", max_steps=4)
    before = np.load(tmp_path / "run" / "data" / "order.npy")
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    from raypipe.data import write_order
    from raypipe.launch.prepared import JobModel
    from raypipe.train import _prepare_data

    longer = prepared(tmp_path / "other", max_steps=9)
    write_order(np.load(tmp_path / "other" / "data" / "order.npy"), tmp_path / "run" / "datasets")
    job = first.job.model_copy(update={"train": longer.job.train})
    _prepare_data(JobModel(job), tmp_path / "run" / "data", True)
    after = np.load(tmp_path / "run" / "data" / "order.npy")
    assert (after.shape, after[:4].tolist()) == ((9, 4), before.tolist())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        logits = self.head(self.norm(self.table(input_ids[:, 0])))
        return nn.functional.cross_entropy(logits, labels)


def test_rows_that_others_see_cannot_be_left_out(tmp_path: Path) -> None:
    """A place without a row would count in the statistics of a batch norm."""
    raypipe.init(pp=1)
    try:
        with pytest.raises(SpecError, match="a mini-batch is short") as caught:
            raypipe.PipelineTrainer(
                model=Normed(), args=arguments(tmp_path / "run"), train_dataset=ROWS, eval_dataset=ROWS[:4],
                data_collator=padded,
            ).prepare()  # fmt: skip
        assert "dataloader_drop_last" in caught.value.fix
    finally:
        raypipe.init()


class Endless:
    def get_train_dataloader(self) -> Any:
        return iter([])


def test_what_has_no_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="get_train_dataloader: returns list_iterator"):
        prepared(tmp_path / "a", Endless)
    with pytest.raises(SpecError, match="has fewer rows than a mini-batch"):
        prepared(tmp_path / "b", per_device_train_batch_size=16, dataloader_drop_last=True)
