"""``compute_loss`` of a subclass and ``compute_loss_func``: the script's loss, captured together with the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.models.given.check import check_function
from raypipe.models.given.read import ITEMS
from raypipe.models.given.write import LossOf, ScriptLoss, accepts_items, loss_in
from raypipe.models.task import IGNORED, cross_entropy

GOES_ON = frozenset({"state", "control", "optimizer", "lr_scheduler", "callback_handler"})
"""Attributes of a trainer whose values follow from the step, which a loss that is captured once does not have."""


def trainers_loss(
    model: Any,
    inputs: dict[str, Any],
    function: Callable[..., Any] | None,
    return_outputs: bool,
    items: Any,
    smoothing: float = 0.0,
) -> Any:
    """Return the loss as ``transformers.Trainer.compute_loss`` does: the model's own, or the function's.

    With a ``smoothing`` and no function it is the cross-entropy of the logits, whatever the model computes from labels.

    Args:
        model: the model.
        inputs: a batch by name.
        function: ``compute_loss_func``.
        return_outputs: whether to return the model's outputs after the loss.
        items: number of labels in the mini-batch.
        smoothing: ``args.label_smoothing_factor``.
    """
    given = dict(inputs)
    labels = given.pop("labels", None) if function is not None or smoothing else None
    if items is not None and accepts_items(getattr(model, "module", model)):
        given[ITEMS] = items
    outputs = model(**given)
    if function is not None:
        loss = function(outputs, labels, num_items_in_batch=items)
    elif labels is not None:
        loss = _smoothed(model, outputs, labels, items, smoothing)
    else:
        loss = loss_in(outputs)
    return (loss, outputs) if return_outputs else loss


def smoothing_loss(smoothing: float) -> ScriptLoss:
    """Return the loss that the Trainer computes with ``label_smoothing_factor`` instead of the model's own."""

    def of(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Any:
        return trainers_loss(model, batch, None, False, items, smoothing)

    return ScriptLoss("args.label_smoothing_factor", of)


def _smoothed(model: Any, outputs: Any, labels: Tensor, items: Any, smoothing: float) -> Tensor:
    """Return what ``transformers.LabelSmoother`` does, as one division, so that the runtime can divide instead."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    inner = getattr(model, "module", model)
    if type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = cross_entropy(logits, labels, smoothing=smoothing)
    return total / (items if items is not None and accepts_items(inner) else labels.ne(IGNORED).sum())


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
    smoother = _smoother(float(trainer.arguments["label_smoothing_factor"] or 0.0))
    held = {**vars(trainer), "label_smoother": smoother, "model_accepts_loss_kwargs": accepts_items(model)}

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


def _smoother(smoothing: float) -> Any:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=smoothing) if smoothing else None


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
