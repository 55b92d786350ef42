"""The learning rate of each step: that of transformers' schedulers, and of a subclass's."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import raypipe
from raypipe.errors import SpecError
from raypipe.job import job_from
from raypipe.runtime.update.optimizer import learning_rate
from tests.trainer import three_steps
from tests.trainer.test_epochs import ROWS, arguments, model

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
    made = kind(model=model(), args=arguments(out, **more), train_dataset=ROWS, callbacks=[Rates()],
                processing_class=None, data_collator=padded)  # fmt: skip
    with contextlib.redirect_stdout(None):
        made.train()
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def column(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)

    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": column("input_ids"), "attention_mask": column("attention_mask"), "labels": labels}


def prepared(out: Path, mixin: type | None = None, job: Any = None, **more: Any) -> Any:
    raypipe.init(pp=2)
    try:
        kind = type("Mine", (*([mixin] if mixin else []), raypipe.PipelineTrainer), {})
        given = arguments(out, **{**SGD, **more})
        return kind(model=model(), args=given, train_dataset=ROWS, eval_dataset=ROWS[:2], job=job).prepare()
    finally:
        raypipe.init()


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


def test_losses_with_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps against the Trainer, and against a plain loop with the rates of the formula."""
    plain_arguments = three_steps.arguments

    def with_restarts(*given: Any) -> Any:
        made = plain_arguments(*given)
        made.lr_scheduler_type, made.lr_scheduler_kwargs = "cosine_with_restarts", {"num_cycles": 2}
        made.warmup_steps = 1
        return made

    monkeypatch.setattr(three_steps, "arguments", with_restarts)
    rows = three_steps.rows_of()
    mine = three_steps.pipelined(model().double(), rows, tmp_path / "mine", 8, job={"train": {"dtype": "float64"}})
    theirs = three_steps.hugging_face(model().double(), rows, tmp_path / "theirs", 8)
    three_steps.assert_alike(mine, theirs, 1e-7)

    trained = model().double().train()
    losses = []
    for rate in (0.0, three_steps.LR, three_steps.LR):  # a warm-up from 0; after it each of two cycles is one step
        batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        loss = trained(**batch).loss
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(trained.parameters()))
        with torch.no_grad():
            for p, grad in zip(trained.parameters(), grads, strict=True):
                p -= rate * grad
    three_steps.assert_alike(mine, three_steps.Outcome(losses, dict(trained.named_parameters())), 1e-9)


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
