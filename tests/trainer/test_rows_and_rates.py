"""Which rows a step reads, and its learning rate: the Trainer's, by its samplers and schedulers or a subclass's."""

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
from raypipe.job import job_from
from raypipe.models import build_model
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.trainer.datasets import PadRows
from tests.trainer.three_steps import (
    LR,
    assert_alike,
    bert,
    degrees,
    hugging_face,
    pipelined,
    plain,
    rows_of,
    whole_batch,
)

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


padded = PadRows(0)


def trainers_rows(out: Path, mixin: type | None, **more: Any) -> list[list[int]]:
    """Return the rows of each step of transformers' Trainer."""
    model = Reads()
    kind = type("Theirs", (*([mixin] if mixin else []), transformers.Trainer), {})
    made = kind(model=model, args=arguments(out, **more), train_dataset=ROWS, data_collator=padded)
    with contextlib.redirect_stdout(None):
        made.train()
    gas = int(more.get("gradient_accumulation_steps", 1))
    per_epoch = len(made.get_train_dataloader())
    result, read = [], list(model.read)
    while read:
        epoch, read = read[:per_epoch], read[per_epoch:]
        result += [[row for one in epoch[k : k + gas] for row in one] for k in range(0, len(epoch), gas)]
    return result


def prepared(out: Path, mixin: type | None = None, job: Any = None, **more: Any) -> Any:
    """Prepare a run of a PipelineTrainer with these arguments."""
    kind = type("Mine", (*([mixin] if mixin else []), raypipe.PipelineTrainer), {})
    with degrees(pp=2):
        given = {"train_dataset": ROWS, "eval_dataset": ROWS[:2], "job": job}
        return kind(model=bert().float(), args=arguments(out, **more), **given).prepare()


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
    with degrees(pp=1), pytest.raises(SpecError, match="a mini-batch is short") as caught:
        raypipe.PipelineTrainer(
            model=Normed(), args=arguments(tmp_path / "run"), train_dataset=ROWS, eval_dataset=ROWS[:4],
            data_collator=padded,
        ).prepare()  # fmt: skip
    assert "dataloader_drop_last" in caught.value.fix


class Endless:
    def get_train_dataloader(self) -> Any:
        return iter([])


def test_what_has_no_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="get_train_dataloader: returns list_iterator"):
        prepared(tmp_path / "a", Endless)
    with pytest.raises(SpecError, match="has fewer rows than a mini-batch"):
        prepared(tmp_path / "b", per_device_train_batch_size=16, dataloader_drop_last=True)


# The learning rate of each step: that of transformers' schedulers, and of a subclass's.


KIND, MORE, WARM = "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"
SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}


class Halves:
    """A subclass's scheduler."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        chosen = self.optimizer if optimizer is None else optimizer  # type: ignore[attr-defined]
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(chosen, 2, gamma=0.5)
        return self.lr_scheduler


class Warmer:
    """Changes the arguments of the Trainer's own scheduler."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return super().create_scheduler(2 * num_training_steps, optimizer)  # type: ignore[misc]


def trainers_rates(out: Path, mixin: type | None, **more: Any) -> list[float]:
    """Do the run with the Trainer, and return the rate of its optimizer before each step."""
    result: list[float] = []

    class Rates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            result.append(optimizer.param_groups[0]["lr"])

    kind = type("Theirs", (*([mixin] if mixin else []), transformers.Trainer), {})
    made = kind(model=bert().float(), args=arguments(out, **more), train_dataset=ROWS, callbacks=[Rates()],
                processing_class=None, data_collator=padded)  # fmt: skip
    with contextlib.redirect_stdout(None):
        made.train()
    return result


def prepared_sgd(out: Path, mixin: type | None = None, job: Any = None, **more: Any) -> Any:
    return prepared(out, mixin, job, **{**SGD, **more})


@pytest.mark.parametrize(
    ("mixin", "more"),
    [
        (None, {KIND: "linear", WARM: 2}),
        (None, {KIND: "cosine", WARM: 0.4}),
        (None, {KIND: "constant", WARM: 2}),
        (None, {KIND: "constant_with_warmup", WARM: 2}),
        (None, {KIND: "cosine", MORE: {"num_cycles": 1.5}}),
        (None, {KIND: "cosine_with_restarts", MORE: {"num_cycles": 2}, WARM: 1}),
        (None, {KIND: "polynomial", MORE: {"power": 2.0, "lr_end": 1e-3}}),
        (None, {KIND: "inverse_sqrt", WARM: 2}),
        (None, {KIND: "cosine_with_min_lr", MORE: {"min_lr_rate": 0.1}}),
        (None, {KIND: "cosine_warmup_with_min_lr", MORE: {"min_lr": 1e-3}, WARM: 2}),
        (None, {KIND: "warmup_stable_decay", MORE: {"num_decay_steps": 2}, WARM: 1}),
        (Halves, {}),
        (Warmer, {KIND: "linear"}),
    ],
)  # fmt: skip
def test_rates_are_the_trainers(tmp_path: Path, mixin: type | None, more: dict[str, Any]) -> None:
    theirs = trainers_rates(tmp_path / "theirs", mixin, **SGD, **more)
    train = prepared_sgd(tmp_path / "mine", mixin, **more).job.train
    assert [learning_rate(train, step) for step in range(train.steps)] == pytest.approx(theirs, rel=1e-14, abs=1e-300)


def test_losses_with_restarts(tmp_path: Path) -> None:
    """Three steps against the Trainer, and against a plain loop with the rates of the formula."""
    rows, fields = rows_of(), {KIND: "cosine_with_restarts", MORE: {"num_cycles": 2}, WARM: 1}
    mine = pipelined(bert(), rows, tmp_path / "mine", 8, fields=fields, job={"train": {"dtype": "float64"}})
    assert_alike(mine, hugging_face(bert(), rows, tmp_path / "theirs", 8, fields=fields), 1e-7)
    rates = (0.0, LR, LR)  # a warm-up from 0; after it each of two cycles is one step
    assert_alike(mine, plain(bert(), whole_batch(rows), rates), 1e-9)


class Plateau:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)  # type: ignore[attr-defined]


class OneCycle:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        chosen = self.optimizer  # type: ignore[attr-defined]
        return torch.optim.lr_scheduler.OneCycleLR(chosen, max_lr=0.1, total_steps=num_training_steps + 1)


class Negative:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 - step)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mixin", "more", "why"),
    [
        (None, {KIND: "greedy", "eval_strategy": "epoch"}, "args.lr_scheduler_type: greedy changes rates by"),
        (None, {KIND: "polynomial", MORE: {"powr": 2}}, "args.lr_scheduler_kwargs: .*powr"),
        (Plateau, {}, "Mine.create_scheduler: ReduceLROnPlateau changes rates by the losses"),
        (OneCycle, {}, "Mine.create_scheduler: OneCycleLR changes momentum"),
        (Negative, {}, "Mine.create_scheduler: gives step 3 a learning rate of -0.05"),
        (Halves, {"job": {"train": {"lr": 1.0}}}, "job.train.lr: has no effect where a scheduler"),
    ],
)  # fmt: skip
def test_other_rates_are_refused(tmp_path: Path, mixin: type | None, more: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        prepared_sgd(tmp_path / "run", mixin, **more)


def test_a_job_files_table_has_a_rate_for_each_step() -> None:
    job = {"name": "a", "model": {"hidden": 16, "layers": 2, "heads": 2, "sequence": 16}, "parallel": {"auto": True},
           "data": {"path": "x"}}  # fmt: skip

    def problem(**train: Any) -> str:
        with pytest.raises(SpecError) as caught:
            job_from({**job, "train": {"steps": 3, "batch": 2, **train}}, "job")
        return str(caught.value)

    assert "2 learning rates, but the run has 3 steps" in problem(lr_table=[0.1, 0.2])
    assert "train.warmup_steps" in problem(lr_table=[0.1, 0.2, 0.3], warmup_steps=1)
    assert "lr_table" in problem(lr_table=[0.1, float("inf"), 0.3])
