"""Three steps of a PipelineTrainer in this process without Ray, of the Hugging Face Trainer, and of a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import raypipe
from raypipe.data import declared_fields, open_data
from raypipe.models import build_model
from raypipe.runtime.update.optimizer import learning_rate
from tests.runtime.runs.one_device import even_cut, one_device

STEPS = 3
LR = 0.05


def mixed_losses() -> bool:
    """Return whether torch differentiates a loss of outputs in float64 and labels in float32, as the Trainer has."""
    try:
        nn.functional.mse_loss(torch.zeros(1, dtype=torch.float64, requires_grad=True), torch.zeros(1)).backward()
    except RuntimeError:
        return False
    return True


def rows_of(count: int = 8, length: int = 10, classes: int = 3) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (count, length), generator=g).tolist()
    labels = torch.randint(0, classes, (count,), generator=g).tolist()
    return [
        {"input_ids": row, "attention_mask": [1] * length, "labels": label}
        for row, label in zip(ids, labels, strict=True)
    ]


def arguments(out: Path, per_device: int, accumulation: int, **fields: Any) -> Any:
    """Return TrainingArguments of three steps; ``fields``: others, or other than these."""
    import transformers

    given = {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation, "learning_rate": LR, "lr_scheduler_type": "constant",
        "optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "seed": 1, **fields,
    }  # fmt: skip
    return transformers.TrainingArguments(**given)


def bert(drop: float = 0.0, **head: Any) -> Any:
    """A classifier of two layers in float64, the same each time; three classes unless ``head`` says otherwise."""
    import transformers

    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
        **{"num_labels": 3, **head},
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


@contextlib.contextmanager
def degrees(**given: int) -> Iterator[None]:
    """Have PipelineTrainer take these degrees in a block."""
    raypipe.init(**given)
    try:
        yield
    finally:
        raypipe.init()


class Outcome:
    """Losses of the steps, and the parameters after them."""

    def __init__(
        self, losses: Sequence[float], parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor] | None = None
    ) -> None:
        self.rows = rows or {}
        """The mini-batch of every step, in its order."""
        self.losses, self.parameters = list(losses), {name: p.detach().clone() for name, p in parameters.items()}


def pipelined(
    model: nn.Module, rows: Sequence[Mapping[str, Any]], out: Path, per_device: int, accumulation: int = 1,
    trainer: type[raypipe.PipelineTrainer] | None = None, split: bool = False, stages: int = 2,
    fields: Mapping[str, Any] | None = None, **more: Any,
) -> Outcome:  # fmt: skip
    """Prepare a run as ``PipelineTrainer`` does, and do its steps with all stages on one device.

    ``fields``: of the arguments; ``more``: of the constructor.
    """
    with degrees(pp=stages):
        args = arguments(out, per_device, accumulation, **(fields or {}))
        kind = trainer or raypipe.PipelineTrainer
        job = kind(model=model, args=args, train_dataset=rows, eval_dataset=rows[:2], **more).prepare().job
    fields = declared_fields(job.data)
    layers = build_model(job, fields)
    data = open_data(out / "data", layers.task, 1)
    rows_in_order = data.batch("train", job.train.seed, 0, job.train.batch)
    dtype = {"float64": torch.float64, "float32": torch.float32, "bfloat16-true": torch.bfloat16}[job.train.dtype]
    one = one_device(layers, even_cut(layers, stages), rows_in_order, dtype, job.parallel.microbatch, split=split,
                     train=job.train)  # fmt: skip
    losses = []
    for step in range(STEPS):
        result = one.executor.run(one.program, step, learning_rate(job.train, step))
        losses.append(result.loss_sum)  # of losses that are divided by the number of targets
    held: dict[str, Tensor] = {}
    for stage in one.stages:
        held |= stage.named
    return Outcome(losses, held, rows_in_order)


def hugging_face(
    model: nn.Module, rows: Sequence[Mapping[str, Any]], out: Path, per_device: int, accumulation: int = 1,
    trainer: Any = None, fields: Mapping[str, Any] | None = None, **more: Any,
) -> Outcome:  # fmt: skip
    """Do the steps with transformers' Trainer; its logged losses are rounded to float32."""
    import transformers

    losses: list[float] = []

    class Losses(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

    kind = trainer or transformers.Trainer
    args = arguments(out, per_device, accumulation, **(fields or {}))
    made = kind(model=model, args=args, train_dataset=rows, callbacks=[Losses()], **more)
    with contextlib.redirect_stdout(None):
        made.train()
    return Outcome(losses, dict(model.named_parameters()))


def plain(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], rates: Sequence[float] = (LR,) * STEPS, momentum: float = 0.0
) -> Outcome:
    """Do the steps in a loop over the whole mini-batch; ``loss`` computes its loss."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, LR, momentum)
    losses = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return Outcome(losses, dict(model.named_parameters()))


def whole_batch(rows: Sequence[Mapping[str, Any]]) -> Callable[[nn.Module], Tensor]:
    """Return the loss that a model itself computes of these rows."""
    return lambda model: model(**{name: torch.tensor([row[name] for row in rows]) for name in rows[0]})["loss"]


def assert_alike(mine: Outcome, other: Outcome, tolerance: float) -> None:
    """Compare losses and all parameters that the pipeline holds."""
    found, right = (torch.tensor(one.losses, dtype=torch.float64) for one in (mine, other))
    torch.testing.assert_close(found, right, rtol=0, atol=tolerance)
    for name, value in mine.parameters.items():
        far = (value - other.parameters[name]).abs().max().item()
        assert far <= tolerance, f"{name} differs by {far}"
