"""Find the function that ``model.loss`` names, and make it the end of the model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raypipe.capture.patches.structures import as_plain
from raypipe.errors import SpecError
from raypipe.graph.fingerprint import module_code
from raypipe.job import CapturedSpec
from raypipe.models.losses.as_it_is import LOSS_AS_IT_IS, LossAsItIs, asked_of_model
from raypipe.models.losses.contrastive import contrastive
from raypipe.models.losses.distillation import distillation
from raypipe.models.losses.figures import as_output
from raypipe.models.losses.preference import dpo, reward
from raypipe.models.sources.imported import find_function
from raypipe.models.sources.source import LossFunction

OWN: dict[str, LossFunction] = {
    "reward": reward,
    "dpo": dpo,
    "distillation": distillation,
    "contrastive": contrastive,
}


def loss_function(spec: CapturedSpec) -> LossFunction | None:
    """Return the function that ``model.loss`` names, with ``loss_args``; None if it names none.

    Raises:
        SpecError: there is no such function, or it does not take a model, a batch and these arguments.
    """
    if spec.loss in ("task", "model"):
        return None
    found = OWN.get(spec.loss) or find_function(spec.loss, "model.loss")
    if inspect.isclass(found):
        fix = "give a function of the model and the batch; what a loss trains belongs into the model"
        raise SpecError("model.loss", f"{spec.loss} is a class", fix)
    try:
        inspect.signature(found).bind(None, None, **spec.loss_args)
    except TypeError as error:
        fix = f"it is called as loss(model, batch, **loss_args), and is {spec.loss.partition(':')[2] or spec.loss}"
        raise SpecError("model.loss", f"{spec.loss}: {error}", fix + str(inspect.signature(found))) from None
    return partial(found, **spec.loss_args)


def loss_code(spec: CapturedSpec) -> list[Path]:
    """Return the files that define the function."""
    return module_code(spec.loss.partition(":")[0]) if ":" in spec.loss else []


class _Model:
    """The model as a loss function calls it: its own forward, and its submodules and attributes."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def end_with_loss(module: nn.Module, function: LossFunction, names: Sequence[str], as_it_is: bool = False) -> nn.Module:
    """Make a module's forward take the batch by these names and return the loss (``as_output``); parameters keep names.

    Args:
        module: the model.
        function: the loss.
        names: the batch's fields.
        as_it_is: take what follows the call of the model as one operation, the module at ``LOSS_AS_IT_IS``.
    """
    own = module.forward
    model = _Model(module, own)
    last = LossAsItIs(module, function)
    # Not registered as a submodule, because a model may go through its children, as nn.Sequential does.
    object.__setattr__(module, LOSS_AS_IT_IS, last)

    def forward(**batch: Tensor) -> dict[str, Tensor]:
        if not as_it_is:
            output, name = as_output(function(model, batch))
            return {name: output}
        args, kwargs = asked_of_model(module, function, batch)
        output = last.forward(as_plain(own(*args, **kwargs)), batch)
        return {last.name: output}

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    module.forward = forward
    return module
