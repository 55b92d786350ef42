"""Loss functions that look at values, as matching found boxes to given ones does: they run as they are.

Such a function cannot be captured, but what comes before it can: the model's call. What the function does with the
model's outputs is one operation at the end of the graph, which the last stage runs in plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from raypipe.errors import CaptureError
from raypipe.models.losses.figures import as_output
from raypipe.models.own_loss import LOSS
from raypipe.models.sources.source import LossFunction

LOSS_AS_IT_IS = "_raypipe_loss"
"""Attribute of the model that holds the function."""
FIX = "call the model once, with arrays of the batch, and compute the loss from what it returns"


class LossAsItIs(nn.Module):
    """The function as a module without parameters, of what the model has returned and the batch.

    Args:
        model: the model, for its attributes (a configuration).
        function: the loss.
    """

    def __init__(self, model: nn.Module, function: LossFunction) -> None:
        super().__init__()
        self._model, self._function = (model,), function
        self.name = LOSS
        """Name of the output, known once the function has run."""

    def forward(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss and figures as one tensor (``as_output``).

        Args:
            outputs: the model's: tensors, or dicts of them, which have their items as attributes too.
            batch: the batch.
        """
        made = self._function(_Answers(self._model[0], by_attribute(outputs)), dict(batch))
        output, self.name = as_output(made)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> LossAsItIs:
        return self  # it has no parameters, and the model is not to be copied


class _Stand:
    """Stands for the model in a loss function; it has its attributes, but neither its parameters nor its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if isinstance(found, nn.Module | Tensor):
            why = f"the function cannot be captured, and reads {name} of the model"
            raise CaptureError("model.loss", why, FIX)
        return found


class _Called(Exception):  # noqa: N818 - no error, but how the function is left
    """The function has called the model with these arguments."""


class _Asks(_Stand):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


class _Answers(_Stand):
    """Returns what the model has computed already, once."""

    def __init__(self, model: nn.Module, outputs: Any) -> None:
        super().__init__(model)
        self._outputs = [outputs]

    def __call__(self, *_: Any, **__: Any) -> Any:
        if not self._outputs:
            why = "the function cannot be captured, and calls the model more than once"
            raise CaptureError("model.loss", why, FIX)
        return self._outputs.pop()


def asked_of_model(
    model: nn.Module, function: LossFunction, batch: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the function calls the model first.

    Raises:
        CaptureError: it does not call it, or reads its parameters before.
    """
    try:
        function(_Asks(model), dict(batch))
    except _Called as called:
        args, kwargs = called.args
        return args, kwargs
    raise CaptureError("model.loss", "the function does not call the model", FIX)


class _Outputs(dict[str, Any]):
    """What a model has returned by name, as attributes, and by position, as transformers' outputs are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model returns no {name}, but {', '.join(self)}") from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


def by_attribute(value: Any) -> Any:
    """Make dicts in ``value`` have their items as attributes."""
    if isinstance(value, Mapping):
        return _Outputs({name: by_attribute(part) for name, part in value.items()})
    if isinstance(value, list):
        return [by_attribute(part) for part in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(by_attribute(part) for part in value)
    return value
