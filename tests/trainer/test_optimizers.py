"""Which optimizer a script gets: the Trainer's, or an error that names what is not carried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raypipe
from raypipe.errors import SpecError
from tests.trainer.test_rows_and_rates import prepared_sgd
from tests.trainer.three_steps import (
    arguments,
    assert_alike,
    bert,
    hugging_face,
    pipelined,
    plain,
    rows_of,
    whole_batch,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_momentum_of_optim_args(tmp_path: Path) -> None:
    rows, fields = rows_of(), {"optim_args": "momentum=0.9"}
    mine = pipelined(bert(), rows, tmp_path / "mine", 8, fields=fields, job={"train": {"dtype": "float64"}})
    assert_alike(mine, hugging_face(bert(), rows, tmp_path / "theirs", 8, fields=fields), 1e-7)
    assert_alike(mine, plain(bert(), whole_batch(rows), momentum=0.9), 1e-9)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"optim": "lion_32bit"}, "args.optim: lion_32bit is not available"),
        ({"optim_args": "nesterov=true"}, "args.optim_args: nesterov=true is not available for"),
        ({"optim": "adamw_torch", "optim_args": "momentum=0.9"}, "args.optim_args: momentum=0.9 is not available"),
    ],
)
def test_other_optimizers_are_refused(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=why):
        prepared_sgd(tmp_path / "run", **more)


class Scaled(nn.Module):
    def __init__(self, size: tuple[int, ...], name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        setattr(self, name, nn.Parameter(torch.ones(size)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        own = next(p for name, p in self.named_parameters() if "linear" not in name)
        return {"loss": (self.linear(x)[..., None] * own - labels).square().mean()}


def layerwise(trained: nn.Module) -> list[dict[str, Any]]:
    """Each layer learns at half the rate of the one above it, and neither norms nor biases decay."""
    groups = []
    for name, p in trained.named_parameters():
        depth = (
            int(name.split("layer.")[1].split(".")[0]) - 2 if "layer." in name else 0 if "classifier" in name else -3
        )
        groups.append({"params": [p], "lr": 0.02 * 2.0**depth, "weight_decay": 0.3 if p.dim() > 1 else 0.0})
    return groups


class Layerwise:
    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(layerwise(self.model), lr=1.0, betas=(0.8, 0.9), eps=1e-6)
        return self.optimizer


class HeadTenTimesFaster:
    """Changes what the Trainer makes."""

    def create_optimizer(self, model: Any = None) -> Any:
        made = super().create_optimizer(model)  # type: ignore[misc]
        head = list(self.model.classifier.parameters())  # type: ignore[attr-defined]
        for group in made.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not q for q in head)]
        made.add_param_group({"params": head, "lr": 10 * made.param_groups[0]["lr"]})
        return made


class AllDecay:
    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if "LayerNorm" not in name]


class Plain:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        return torch.optim.Adam, {"lr": args.learning_rate, "betas": (0.7, 0.8), "eps": 1e-4}


class Root:
    def create_optimizer(self) -> Any:
        groups = layerwise(self.model)  # type: ignore[attr-defined]
        self.optimizer = torch.optim.RMSprop(groups, alpha=0.9, momentum=0.5)
        return self.optimizer


def scheduled(trained: nn.Module) -> dict[str, Any]:
    """Half of the parameters; the others are not in it."""
    first = [p for name, p in trained.named_parameters() if "layer.0" in name]
    last = [p for name, p in trained.named_parameters() if "classifier" in name]
    made = torch.optim.SGD([{"params": first, "lr": 0.01}, {"params": last}], lr=0.05, momentum=0.9, weight_decay=0.1)
    return {"optimizers": (made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: (step + 1) / 3))}


def of_class(trained: nn.Module) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.8})}


def nothing(trained: nn.Module) -> dict[str, Any]:
    return {}


CASES: dict[str, tuple[type | None, Callable[[nn.Module], dict[str, Any]], dict[str, Any]]] = {
    "layerwise": (Layerwise, nothing, {"lr_scheduler_type": "linear", "warmup_steps": 1}),
    "layerwise-restarts": (Layerwise, nothing, {"lr_scheduler_type": "cosine_with_restarts"}),
    "head": (HeadTenTimesFaster, nothing, {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.2}),
    "decay": (AllDecay, nothing, {"weight_decay": 0.2, "adam_epsilon": 1e-3}),
    "class": (Plain, nothing, {"weight_decay": 0.1}),
    "adagrad": (None, nothing, {"optim": "adagrad", "weight_decay": 0.1, "optim_args": "eps=1e-3"}),
    "adagrad-eps": (None, nothing, {"optim": "adagrad", "adam_epsilon": 0.1}),
    "adafactor": (None, nothing, {"optim": "adafactor", "learning_rate": 1e-2, "weight_decay": 0.1}),
    "rmsprop": (None, nothing, {"optim": "rmsprop", "learning_rate": 1e-3, "optim_args": "momentum=0.9,alpha=0.8"}),
    "rmsprop-class": (Root, nothing, {"weight_decay": 0.1}),
    "given": (None, scheduled, {"max_grad_norm": 0.5, "adam_beta1": 0.8}),
    "cls-and-kwargs": (None, of_class, {"weight_decay": 0.1, "max_grad_norm": 0.5}),
}


def both(case: str) -> tuple[type, type, Any, dict[str, Any]]:
    """The same script's trainers, what their constructors get besides, and fields of the arguments."""
    mixin, more, fields = CASES[case]
    kinds = raypipe.PipelineTrainer, transformers.Trainer
    mine, theirs = (type("Mine", (*([mixin] if mixin else []), kind), {}) for kind in kinds)
    return mine, theirs, more, fields


@pytest.mark.parametrize(("case", "split"), [*((case, False) for case in CASES), ("layerwise", True), ("given", True)])
def test_three_steps_of_a_scripts_optimizer(case: str, split: bool, tmp_path: Path) -> None:
    mine, theirs, more, fields = both(case)
    rows, one, two = rows_of(), bert(), bert()
    result = pipelined(one, rows, tmp_path / "mine", 8, trainer=mine, split=split, fields=fields, **more(one))
    right = hugging_face(two, rows, tmp_path / "theirs", 8, trainer=theirs, fields=fields, **more(two))
    assert_alike(result, right, 1e-7)
    unchanged = dict(bert().named_parameters())
    assert any((result.parameters[name] - p).abs().max() > 1e-4 for name, p in unchanged.items())


@pytest.mark.parametrize(("size", "name"), [((2,), "scale"), ((2, 2), "pair_bias")])
def test_what_decays_in_the_trainer_decays(size: tuple[int, ...], name: str, tmp_path: Path) -> None:
    """A vector that is named neither norm nor bias decays there, and a matrix that is named a bias does not."""
    fields = {"weight_decay": 0.5}
    rows = [{"x": torch.randn(2).double(), "labels": torch.randn(2, 2).double()} for _ in range(8)]

    def scaled() -> nn.Module:
        torch.manual_seed(0)
        return Scaled(size, name).double()

    result = pipelined(scaled(), rows, tmp_path / "mine", 8, stages=1, fields=fields)
    assert_alike(result, hugging_face(scaled(), rows, tmp_path / "theirs", 8, fields=fields), 1e-7)


def amsgrad(trained: nn.Module) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True})}


def adadelta(trained: nn.Module) -> dict[str, Any]:
    return {"optimizers": (torch.optim.Adadelta(trained.parameters()), None)}


def betas(trained: nn.Module) -> dict[str, Any]:
    first, *others = trained.parameters()
    return {"optimizers": (torch.optim.Adam([{"params": first, "betas": (0.5, 0.6)}, {"params": others}]), None)}


def foreign(trained: nn.Module) -> dict[str, Any]:
    return {"optimizers": (torch.optim.SGD([*trained.parameters(), nn.Parameter(torch.ones(1))]), None)}


def used(trained: nn.Module) -> dict[str, Any]:
    made = torch.optim.Adam(trained.parameters())
    for p in trained.parameters():
        p.grad = torch.ones_like(p)
    made.step()
    return {"optimizers": (made, None)}


def hooked(trained: nn.Module) -> dict[str, Any]:
    made = torch.optim.Adam(trained.parameters())
    made.register_step_post_hook(lambda *_: None)
    return {"optimizers": (made, None)}


def still(trained: nn.Module) -> dict[str, Any]:
    return {"optimizers": (torch.optim.SGD(trained.parameters(), lr=0.0), None)}


def apart(trained: nn.Module) -> dict[str, Any]:
    """The two groups' rates meet at the end."""
    made = scheduled(trained)["optimizers"][0]
    return {"optimizers": (made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 3, eta_min=0.001))}


def alone(trained: nn.Module) -> dict[str, Any]:
    return {"optimizers": (None, scheduled(trained)["optimizers"][1])}


def twice(trained: nn.Module) -> dict[str, Any]:
    return {**scheduled(trained), **of_class(trained)}


def beside(trained: nn.Module) -> dict[str, Any]:
    return {**of_class(trained), "job": {"train": {"momentum": 0.5}}}


def by_name(trained: nn.Module) -> dict[str, Any]:
    return {**of_class(trained), "model": {"hf": "bert", "config": {}}}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (amsgrad, "optimizer_cls_and_kwargs: its optimizer has amsgrad=True, which is not available"),
        (adadelta, "optimizers: makes Adadelta, which is not available"),
        (betas, "optimizers: its groups differ in betas, and here they may in lr and weight_decay alone"),
        (foreign, "optimizers: its optimizer has a parameter that is not the model's"),
        (used, "optimizers: its optimizer has made steps already"),
        (hooked, "optimizers: its optimizer has hooks"),
        (still, "optimizers: its highest learning rate is 0"),
        (apart, "optimizers: CosineAnnealingLR gives step 2 rates of groups that are no multiples"),
        (alone, "optimizers: its scheduler is of another optimizer"),
        (twice, "optimizer_cls_and_kwargs: and optimizers are both given"),
        (beside, "job.train.momentum: is given beside optimizer_cls_and_kwargs"),
        (by_name, "optimizer_cls_and_kwargs: is about the parameters of a model, and this one is given by name"),
    ],
)
def test_what_is_not_carried_of_an_optimizer_is_one_error(more: Any, why: str, tmp_path: Path) -> None:
    trained = bert()
    given = {"model": trained, "args": arguments(tmp_path / "run", 8, 1), **more(trained)}
    with pytest.raises(SpecError, match=why):
        raypipe.PipelineTrainer(train_dataset=rows_of(), **given).prepare()
