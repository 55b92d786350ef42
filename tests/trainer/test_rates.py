"""The learning rate of each step: that of transformers' schedulers, and of a subclass's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.errors import SpecError
from raypipe.job import job_from
from raypipe.runtime.update.optimizer import learning_rate
from tests.trainer import test_epochs
from tests.trainer.test_epochs import ROWS, arguments, padded
from tests.trainer.three_steps import LR, assert_alike, bert, hugging_face, pipelined, plain, rows_of, whole_batch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

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
    found: list[float] = []

    class Rates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            found.append(optimizer.param_groups[0]["lr"])

    kind = type("Theirs", (*([mixin] if mixin else []), transformers.Trainer), {})
    made = kind(model=bert().float(), args=arguments(out, **more), train_dataset=ROWS, callbacks=[Rates()],
                processing_class=None, data_collator=padded)  # fmt: skip
    with contextlib.redirect_stdout(None):
        made.train()
    return found


def prepared(out: Path, mixin: type | None = None, job: Any = None, **more: Any) -> Any:
    return test_epochs.prepared(out, mixin, job, **{**SGD, **more})


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
    train = prepared(tmp_path / "mine", mixin, **more).job.train
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
        prepared(tmp_path / "run", mixin, **more)


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
