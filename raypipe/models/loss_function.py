"""The function that ``model.loss`` names, made the end of the model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.capture.captured import Captured, Notify, to_stderr
from raypipe.capture.meta import build_without_memory
from raypipe.capture.opaque import as_plain, like
from raypipe.compat.torch_private import _pytree as pytree
from raypipe.errors import CaptureError, RequestError, SpecError
from raypipe.graph.fingerprint import module_code
from raypipe.job import CapturedSpec
from raypipe.models.losses import LOSS, LossFunction, contrastive, distillation, dpo, reward
from raypipe.models.sources.imported import find_function
from raypipe.models.task import Field

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
    result = OWN.get(spec.loss) or find_function(spec.loss, "model.loss")
    if inspect.isclass(result):
        fix = "give a function of the model and the batch; what a loss trains belongs into the model"
        raise SpecError("model.loss", f"{spec.loss} is a class", fix)
    try:
        inspect.signature(result).bind(None, None, **spec.loss_args)
    except TypeError as error:
        fix = f"it is called as loss(model, batch, **loss_args), and is {spec.loss.partition(':')[2] or spec.loss}"
        raise SpecError("model.loss", f"{spec.loss}: {error}", fix + str(inspect.signature(result))) from None
    return partial(result, **spec.loss_args)


def loss_code(spec: CapturedSpec) -> list[Path]:
    """Return the files that define the function."""
    return module_code(spec.loss.partition(":")[0]) if ":" in spec.loss else []


class _CalledModel:
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
    model = _CalledModel(module, own)
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


# Figures that a loss function returns beside its loss, such as how often DPO's model prefers the chosen text.
#
# A captured model has one output, so loss and figures are one tensor: the loss first in its last dimension. The
# output's name holds theirs, and so it stays with a graph that is kept on disk.
BETWEEN = ","
WHERE = "model.loss"


def loss_and_figures(made: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the parts of what a loss function has returned: the loss, or the loss and a dict of figures of its shape.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(made, Tensor):
        return made, {}
    fix = "return the loss, or the loss and a dict of tensors of its shape, as in (loss, {'accuracy': hits})"
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor) and isinstance(made[1], Mapping)
    ):
        raise SpecError(WHERE, f"the function returns {_kind(made)}", fix)
    loss, figures = made
    for name, figure in figures.items():
        if not isinstance(figure, Tensor) or figure.shape != loss.shape:
            shape = list(figure.shape) if isinstance(figure, Tensor) else _kind(figure)
            raise SpecError(WHERE, f"the figure {name} is {shape}, the loss {list(loss.shape)}", fix)
        if not isinstance(name, str) or not name or name == LOSS or BETWEEN in name:
            raise SpecError(WHERE, f"a figure is named {name!r}", f"use a name without commas, other than {LOSS}")
    return loss, dict(figures)


def as_output(made: Any) -> tuple[Tensor, str]:
    """Return the captured model's output and its name, from what a loss function has returned."""
    loss, figures = loss_and_figures(made)
    if not figures:
        return loss, LOSS
    values = [figure.detach().to(loss.dtype) for figure in figures.values()]
    return torch.stack([loss, *values], -1), BETWEEN.join([LOSS, *figures])


def figures_of(output: str) -> tuple[str, ...]:
    """Return the names of the figures from the output's.

    >>> figures_of("loss"), figures_of("loss,accuracy,margin")
    ((), ('accuracy', 'margin'))
    """
    return tuple(output.split(BETWEEN)[1:])


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


# Loss functions that look at values, as matching found boxes to given ones does: they run as they are.
#
# Such a function cannot be captured, but what comes before it can: the model's call. What the function does with the
# model's outputs is one operation at the end of the graph, which the last stage runs in plain Python.
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


class _ModelProxy:
    """Stands for the model in a loss function; it has its attributes, but neither its parameters nor its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        result = getattr(self._model, name)
        if isinstance(result, nn.Module | Tensor):
            why = f"the function cannot be captured, and reads {name} of the model"
            raise CaptureError("model.loss", why, FIX)
        return result


class _Called(Exception):  # noqa: N818 - no error, but how the function is left
    """The function has called the model with these arguments."""


class _Asks(_ModelProxy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


class _Answers(_ModelProxy):
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


class _NamedOutputs(dict[str, Any]):
    """A model's results by name, as attributes, and by position, as transformers' outputs are."""

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
        return _NamedOutputs({name: by_attribute(part) for name, part in value.items()})
    if isinstance(value, list):
        return [by_attribute(part) for part in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(by_attribute(part) for part in value)
    return value


# The capture of a model with the function at its end, or with the function as it is where it looks at values.


def capture_with_loss(
    build: Callable[[], nn.Module],
    function: LossFunction,
    names: Sequence[str],
    example: Mapping[str, object],
    as_it_is: Sequence[str] = (),
    notify: Notify = to_stderr,
) -> Captured:
    """Capture the model that ``build`` constructs, with the function at its end.

    Args:
        build: the constructor.
        function: the loss.
        names: the batch's fields.
        example: a batch.
        as_it_is: paths of modules that run as they are.
        notify: called with a sentence about what runs as it is.

    Raises:
        CaptureError: the model cannot be captured, or neither can the function, which does not run as it is either.
    """
    from raypipe.capture.capture import capture  # torch.export and SymPy

    skeleton = build_without_memory(lambda: end_with_loss(build(), function, names))
    try:
        return capture(skeleton, example, as_it_is=as_it_is, notify=notify)
    except CaptureError as error:
        first = error
    skeleton = build_without_memory(lambda: end_with_loss(build(), function, names, as_it_is=True))
    try:
        result = capture(skeleton, example, as_it_is=(*as_it_is, LOSS_AS_IT_IS), notify=notify)
    except CaptureError as error:
        if error.why == first.why:
            raise
        why = f"{first.why}; and with the loss function as it is: {error.where}: {error.why}"
        raise CaptureError(first.where, why, first.fix) from error
    notify(f"the loss function runs as it is, on the last stage, for it cannot be captured: {first.where}: {first.why}")
    return result


def check_function(module: nn.Module, function: LossFunction, fields: Mapping[str, Field], whole: bool) -> None:
    """Run a loss function on made-up values, and compare two samples together with each alone.

    The model's outputs are random and depend on the sample alone, so this is of the function, not of the model. A model
    that cannot run without values of parameters is not checked, and neither is a function that draws random numbers.

    Args:
        module: the model, with parameters on the meta device.
        function: the loss.
        fields: the batch's fields.
        whole: the loss is one of a whole micro-batch, a scalar.

    Raises:
        SpecError: what it returns is no loss of each sample (or no scalar), has figures of another shape, or depends on
            other samples.
    """
    batch = {name: _made_up(name, field) for name, field in fields.items()}
    model = _RandomModel(module)
    try:
        with torch.random.fork_rng([]):
            made = function(model, batch)
            together, again = (as_output(one)[0] for one in (made, function(model, batch)))
        alone = [as_output(function(model, {name: t[i : i + 1] for name, t in batch.items()}))[0] for i in range(2)]
    except RequestError:
        raise
    except Exception:  # of the user's code, or of a model that looks at values; the capture says what and where
        return
    loss, _ = loss_and_figures(made)
    fix = "as with reduction='none'; for one loss of a micro-batch as a whole, set model.loss_per: microbatch"
    if whole:
        if loss.dim():
            why = f"the function returns shape {list(loss.shape)}, which is no scalar"
            raise SpecError("model.loss", why, "reduce it, or leave model.loss_per out")
        return
    if not loss.dim() or loss.shape[0] != 2:
        why = f"the function returns shape {list(loss.shape)} for 2 samples, so micro-batches cannot be added up"
        raise SpecError("model.loss", why, f"return one loss a sample, {fix}")
    if not torch.equal(together.nan_to_num(), again.nan_to_num()):
        return  # it draws random numbers, which follow from each sample's key when a stage runs it
    if not torch.allclose(together.flatten(), torch.cat([t.flatten() for t in alone]), 1e-6, 1e-9, equal_nan=True):
        why = "what it returns of a sample depends on other samples, so it would change with the size of micro-batches"
        raise SpecError("model.loss", why, f"return losses that do not, {fix}")


class _RandomModel:
    """Stands for a module: outputs have the shapes of the module's, and random values that follow from the inputs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from raypipe.capture.tracing import fake_parameters
        from raypipe.compat.torch_private import FakeTensorMode

        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_parameters(self._module, fake), fake, torch.no_grad():
            moved = pytree.tree_map_only(
                Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), (args, kwargs)
            )
            made = self._module.forward(*moved[0], **moved[1])
        samples = given[0].shape[0]
        own = [t for t in given if t.dim() and t.shape[0] == samples]
        seeds = [hash(tuple(t[i].numpy().tobytes() for t in own)) for i in range(samples)]

        def fill(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return torch.zeros(x.shape, dtype=x.dtype)
            if x.dim() and x.shape[0] == samples:
                return torch.stack([_normal(seed, x.shape[1:]) for seed in seeds])
            return _normal(0, x.shape)

        return like(made, pytree.tree_map_only(Tensor, fill, as_plain(made)))

    def __getattr__(self, name: str) -> Any:
        result = getattr(self._module, name)
        if isinstance(result, nn.Module):
            return _RandomModel(result)
        return _normal(0, result.shape) if isinstance(result, Tensor) and result.is_floating_point() else result


def _normal(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)


def _made_up(name: str, field: Field) -> Tensor:
    shape = (2, *field.shape)
    if field.dtype.is_floating_point:
        return _normal(len(name), shape)
    if "label" in name:  # any class but the first may not exist
        return torch.zeros(shape, dtype=field.dtype)
    return (_normal(len(name), shape) > 0).to(field.dtype)
