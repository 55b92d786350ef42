"""Trace a model instance where it stands: without its values, with a loss of the script at its end, and unharmed."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.models.given.refused import check_state, state_of

ITEMS = "num_items_in_batch"
"""Argument with which the Trainer tells a loss how many labels its whole mini-batch has."""

LossOf = Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]
"""The loss of a model on a batch by name; the last argument is ``ITEMS``, which it may leave unread."""


class Root(nn.Module):
    """Has a model's submodules, parameters and buffers under their own names, and calls it, or a loss of it.

    The model itself stays as it is, so that what the script has put on it is traced: a forward of its own, or functions
    that call parts of the model.

    Args:
        model: the instance.
        names: names of the forward's arguments.
        end: returns the outputs by name from the model and its arguments by name.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], end: Callable[[nn.Module, dict[str, Any]], Any]) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = vars(model)[kind]
        self.__dict__["training"] = model.training

        def forward(**given: Any) -> Any:
            return end(model, given)

        kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        self.forward = forward


@contextmanager
def as_trained(model: nn.Module, dtype: torch.dtype, frozen_norms: bool = False) -> Iterator[None]:
    """Put a model into the state in which it trains, with parameters on the meta device, inside the block.

    An instance in evaluation mode as a whole, as ``from_pretrained`` returns it, is put in training mode as the Trainer
    does it; else each module keeps its mode.

    Args:
        model: the instance; all is restored after the block.
        dtype: the dtype to convert floating-point parameters and buffers to.
        frozen_norms: put batch norms in evaluation mode.

    Raises:
        SpecError: the forward changes an attribute, or draws from Python's or numpy's generators.
    """
    modes = [(part, part.training) for part in model.modules()]
    with ExitStack() as stack:
        stack.callback(_restore_modes, modes)
        if not model.training:
            model.train()
        if frozen_norms:
            for part in model.modules():
                if isinstance(part, nn.modules.batchnorm._BatchNorm):
                    part.eval()
        for one in _caching(model):
            stack.callback(setattr, one, "use_cache", one.use_cache)
            one.use_cache = False  # it changes no value, and its keys and values are no outputs
        for part in model.modules():
            if getattr(part, "gradient_checkpointing", False) is True:
                stack.callback(setattr, part, "gradient_checkpointing", True)
                part.gradient_checkpointing = False  # type: ignore[assignment]
        stack.callback(_swap(model, dtype))
        state, numbers, arrays = state_of(model), random.getstate(), repr(np.random.get_state())
        yield
        check_state(state, model)
        if random.getstate() != numbers or repr(np.random.get_state()) != arrays:
            why = "draws numbers from Python's or numpy's generator in its forward, which would always be the same ones"
            raise SpecError("model", why, "draw them with torch")


def _caching(model: nn.Module) -> list[Any]:
    """Return the configurations of a model of transformers that say whether it keeps keys and values."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return []
    return [one for one in {id(c): c for c in (config, config.get_text_config())}.values() if hasattr(one, "use_cache")]


def _restore_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for part, training in modes:
        part.training = training


def _swap(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Put stand-ins in the place of parameters and buffers; return what undoes it."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, Any] = {}
    for part in model.modules():
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                undo.append((held, name, value))
                if id(value) not in made:
                    kind = dtype if value.is_floating_point() else value.dtype
                    made[id(value)] = (
                        nn.Parameter(torch.empty(value.shape, dtype=kind, device="meta"), value.requires_grad)
                        if isinstance(value, nn.Parameter)
                        else value.detach().to("cpu", kind, copy=True)
                    )
    for held, name, value in undo:
        held[name] = made[id(value)]

    def restore() -> None:
        for held, name, value in undo:
            held[name] = value

    return restore


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of all of a model's floating-point parameters.

    Raises:
        SpecError: there are several, or one in which nothing trains.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            first.setdefault(parameter.dtype, name)
    if not first:
        raise SpecError("model", "has no parameters, so there is nothing to train", "give a model with parameters")
    if len(first) > 1:
        what = ", ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in first.items())
        why = f"its parameters are of several dtypes: {what}"
        raise SpecError("model", why, "convert it, for example model.float()")
    (found,) = first
    return found


def kept_in_evaluation(model: nn.Module) -> list[str]:
    """Return the outermost modules that are in evaluation mode inside a model in training mode."""
    found: list[str] = []
    if model.training:
        for path, part in model.named_modules():
            if not part.training and not any(path.startswith(f"{outer}.") for outer in found):
                found.append(path)
    return found


def accepts_items(model: nn.Module) -> bool:
    """Return whether the Trainer passes ``ITEMS`` to a model's forward."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the Trainer counts a model's labels without each row's first, as causal language models' are."""
    try:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    except ImportError:
        return False
    config = getattr(model, "config", None)
    kind = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")
    return kind is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False)


def models_own(model: nn.Module, batch: dict[str, Tensor], items: Tensor) -> Tensor:
    """Return the loss that a model computes itself (a ``LossOf``), as the Trainer reads it.

    Raises:
        SpecError: it returns none.
    """
    more = {ITEMS: items} if accepts_items(model) else {}
    return loss_in(model(**batch, **more))


def loss_in(outputs: Any) -> Tensor:
    """Return the loss among a model's outputs: by its name, or else the first.

    Raises:
        SpecError: there is none.
    """
    if isinstance(outputs, Tensor):
        found: Any = outputs
    elif isinstance(outputs, Mapping):
        if outputs.get("loss") is None:
            fix = 'return a dict with "loss" when the forward is given labels, or give compute_loss_func'
            raise SpecError("model", f"returns no loss, but {', '.join(map(str, outputs))}", fix)
        found = outputs["loss"]
    else:
        found = outputs[0]
    return scalar(found, "model")


def scalar(found: Any, where: str) -> Tensor:
    """Check that a loss is one number.

    Raises:
        SpecError: it is not.
    """
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        shape = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise SpecError(where, f"returns {shape} as the loss", "return a scalar")
    return found.reshape(()) if found.dim() else found
