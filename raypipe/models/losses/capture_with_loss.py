"""Capture a model with the loss function at its end, or with the function as it is where it looks at values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from raypipe.capture.capture import capture
from raypipe.capture.captured import Captured
from raypipe.capture.meta import build_without_memory
from raypipe.capture.patches import fake_parameters
from raypipe.capture.structures import as_plain, like
from raypipe.errors import CaptureError, RequestError, SpecError
from raypipe.graph.captured_files import Notify, to_stderr
from raypipe.models.losses.function import LOSS_AS_IT_IS, as_output, end_with_loss, loss_and_figures
from raypipe.models.sources.source import LossFunction
from raypipe.models.task import Field


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
    skeleton = build_without_memory(lambda: end_with_loss(build(), function, names))
    try:
        return capture(skeleton, example, as_it_is=as_it_is, notify=notify)
    except CaptureError as error:
        first = error
    skeleton = build_without_memory(lambda: end_with_loss(build(), function, names, as_it_is=True))
    try:
        found = capture(skeleton, example, as_it_is=(*as_it_is, LOSS_AS_IT_IS), notify=notify)
    except CaptureError as error:
        if error.why == first.why:
            raise
        why = f"{first.why}; and with the loss function as it is: {error.where}: {error.why}"
        raise CaptureError(first.where, why, first.fix) from error
    notify(f"the loss function runs as it is, on the last stage, for it cannot be captured: {first.where}: {first.why}")
    return found


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
        found = getattr(self._module, name)
        if isinstance(found, nn.Module):
            return _RandomModel(found)
        return _normal(0, found.shape) if isinstance(found, Tensor) and found.is_floating_point() else found


def _normal(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)


def _made_up(name: str, field: Field) -> Tensor:
    shape = (2, *field.shape)
    if field.dtype.is_floating_point:
        return _normal(len(name), shape)
    if "label" in name:  # any class but the first may not exist
        return torch.zeros(shape, dtype=field.dtype)
    return (_normal(len(name), shape) > 0).to(field.dtype)
