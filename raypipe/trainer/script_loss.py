"""``compute_loss`` of a subclass and ``compute_loss_func``: the script's loss, captured together with the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.models.given.refused import check_function
from raypipe.models.given.root import ITEMS, LossOf, accepts_items, loss_in
from raypipe.models.given.write import ScriptLoss

GOES_ON = frozenset({"state", "control", "optimizer", "lr_scheduler", "callback_handler"})
"""Attributes of a trainer whose values follow from the step, which a loss that is captured once does not have."""


def trainers_loss(
    model: Any, inputs: dict[str, Any], function: Callable[..., Any] | None, return_outputs: bool, items: Any
) -> Any:
    """Return the loss as ``transformers.Trainer.compute_loss`` does: the model's own, or the function's.

    Args:
        model: the model.
        inputs: a batch by name.
        function: ``compute_loss_func``.
        return_outputs: whether to return the model's outputs after the loss.
        items: number of labels in the mini-batch.
    """
    given = dict(inputs)
    labels = given.pop("labels", None) if function is not None else None
    if items is not None and accepts_items(getattr(model, "module", model)):
        given[ITEMS] = items
    outputs = model(**given)
    loss = loss_in(outputs) if function is None else function(outputs, labels, num_items_in_batch=items)
    return (loss, outputs) if return_outputs else loss


def script_loss(trainer: Any, plain: type, function: Callable[..., Any] | None) -> ScriptLoss | None:
    """Return the loss that a script gives its trainer; None if it is the model's or the task's.

    Args:
        trainer: the trainer.
        plain: the class whose ``compute_loss`` is ``trainers_loss``.
        function: ``compute_loss_func``.
    """
    method = type(trainer).compute_loss
    if "compute_loss" in vars(trainer):
        return ScriptLoss("compute_loss", _method(trainer, vars(trainer)["compute_loss"], bound=True))
    if method is not plain.compute_loss:  # type: ignore[attr-defined]
        name = f"{type(trainer).__name__}.compute_loss"
        return ScriptLoss(name, _method(trainer, method, bound=False))
    if function is None:
        return None

    def of(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Any:
        check_function(function, "compute_loss_func", {id(part) for part in model.modules()})
        return trainers_loss(model, batch, function, False, items)

    return ScriptLoss("compute_loss_func", of)


def _method(trainer: Any, method: Callable[..., Any], bound: bool) -> LossOf:
    takes = inspect.signature(method).parameters
    counts = ITEMS in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())

    def of(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Any:
        where = f"{type(trainer).__name__}.compute_loss"
        check_function(method, where, {id(part) for part in model.modules()}, frozenset({"self", "__class__"}))
        first = () if bound else (_stand_in(trainer, model, where),)
        found = method(*first, model, dict(batch), **({ITEMS: items} if counts else {}))
        return found[0] if isinstance(found, tuple) else found

    return of


def _stand_in(trainer: Any, model: nn.Module, where: str) -> Any:
    """Return what a method gets as ``self``: the trainer's attributes, but for those that change while it trains."""
    held = {**vars(trainer), "label_smoother": None, "model_accepts_loss_kwargs": accepts_items(model)}

    def get(self: Any, name: str) -> Any:
        if name in GOES_ON:
            why = f"reads self.{name}, which changes while training; the loss is captured once"
            raise SpecError(where, why, "leave it out, or pass what changes as a column of the data")
        if name == "model":
            return model
        if name in held:
            return held[name]
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            why = f"reads self.{name}, which a PipelineTrainer has not"
            raise SpecError(where, why, "compute the loss from the model and its inputs") from None

    def put(self: Any, name: str, value: Any) -> NoReturn:
        why = f"assigns to self.{name}, which no worker has"
        raise SpecError(where, why, "compute the loss from the model and its inputs alone")

    kind = type(f"{type(trainer).__name__}", (type(trainer),), {"__getattribute__": get, "__setattr__": put})
    return object.__new__(kind)


def with_script_loss(made: Any, trainer: Any, script: ScriptLoss | None) -> Any:
    """Make a ``transformers.Trainer`` compute its loss as the script does, and return it."""
    if script is not None:

        @functools.wraps(type(made).compute_loss)
        def compute_loss(
            model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            takes = inspect.signature(trainer.compute_loss).parameters
            counts = ITEMS in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
            more = {ITEMS: num_items_in_batch} if counts else {}
            return trainer.compute_loss(model, inputs, return_outputs=return_outputs, **more)

        made.compute_loss = compute_loss
    return made
