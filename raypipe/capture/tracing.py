"""How a model's forward runs while it is traced, so that more models can be captured and none with other gradients.

``traced`` sets a torch function mode, which sees the calls that a forward makes of torch. What makes no such call is
replaced for the time of the trace: ``Function.apply``, ``nn.Module.to``, ``len`` (as torch's exporter itself replaces
``max``, ``min`` and ``pow``), how ``nn.TransformerEncoder`` looks at masks, and how the exporter, which makes a
``ShapeEnv`` of its own, fixes sizes.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import transformer
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from raypipe.capture.meta import stand_ins
from raypipe.capture.opaque import alpha_dropout
from raypipe.compat.torch_private import FakeTensorMode, ShapeEnv, _parse_to
from raypipe.compat.torch_private import _pytree as pytree
from raypipe.compat.transformers_private import changed_while_traced

SIZE = (int, torch.SymInt)


class NotTracedError(Exception):
    """A forward does what no graph would do, or what would fit micro-batches of one size only; its module stays."""


@contextmanager
def traced(samples: int | None = None, listed: list[str] | None = None) -> Iterator[None]:
    """Run what is in the block as a forward that is traced.

    Args:
        samples: the number of samples of the example.
        listed: gets an entry for each list of the batch's samples, which then holds stand-ins; without it, such a list
            fixes the number of samples.
    """
    changes: tuple[tuple[Any, str, Any], ...] = (
        (Function, "apply", classmethod(_apply)),
        (builtins, "len", _len),
        (ShapeEnv, "_set_replacement", _set_replacement),
        # Only a hint beside the mask follows from its values; ``attention_masks`` decides it after the capture.
        (transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True),
        *changed_while_traced(),
    )
    hook = register_module_forward_pre_hook(_no_backward_hooks)
    try:
        with _replaced(*changes), _module_casts(), _TracedCalls(samples, listed):
            yield
    finally:
        hook.remove()


@contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, given as (owner, name, value), and set them back when the block ends."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class _TracedCalls(TorchFunctionMode):
    """Changes the calls of torch that a graph would not have, or not for another number of samples."""

    def __init__(self, samples: int | None, listed: list[str] | None) -> None:
        super().__init__()
        self.samples, self.listed = samples, listed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _STOPS and _is_traced((args, kwargs)):
            raise NotTracedError(f"{_STOPS[func]} is no operation of a graph")
        if func is torch.div and all(isinstance(x, SIZE) for x in args[:2]):
            return _divided(*args, **kwargs)
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            return _alpha_dropout(func is F.feature_alpha_dropout, *args, **kwargs)
        if func in (Tensor.unbind, torch.unbind, Tensor.__len__) and self.listed is not None and args:
            whole, dim = args[0], kwargs.get("dim", (*args, 0)[1])
            if whole.dim() and isinstance(whole.shape[0], torch.SymInt) and not dim and _hint(whole) == self.samples:
                if func is Tensor.__len__:  # list() asks for it
                    return self.samples
                self.listed.append(str(whole.shape))
                return tuple(_Sample(whole, number) for number in range(self.samples or 0))
        return func(*args, **kwargs)


def _is_traced(values: Any) -> bool:
    """Return whether there are tensors that are traced: those of a trial run beside the trace are torch's own."""
    return any(type(t) not in (Tensor, nn.Parameter) for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


# What a forward does to gradients beside its operations: hooks on tensors and modules, derivatives of its own, and
# functions with a backward of their own (``torch.autograd.Function``). The exporter records none of these, and of such
# a function what its forward does, whose derivative is another gradient wherever the backward is an estimate or a bound
# (YOSO, RecurrentGemma). So they stop the capture, and their module runs as it is. A checkpoint in torch's older form
# is such a function too; its backward is the derivative, and it is traced as what it calls.
_STOPS = {
    Tensor.register_hook: "a tensor's hook on its gradient",
    Tensor.backward: "a backward inside a forward",
    torch.autograd.backward: "a backward inside a forward",
    torch.autograd.grad: "a derivative taken in a forward",
}
DERIVATIVES = {"transformers.models.bloom.modeling_bloom.GeLUFunction"}
"""Functions whose backward is the derivative of their forward, so that it does not matter which is used."""
_plain_apply, _plain_len, _plain_set_replacement = Function.__dict__["apply"], len, ShapeEnv._set_replacement


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is CheckpointFunction:
        function, _, *operands = args  # what it recomputes is the plan's to choose
        return function(*operands)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if _is_traced(args) and not name.startswith("torch.") and name not in DERIVATIVES:
        raise NotTracedError(f"{cls.__name__} has a backward of its own, which a captured graph would not use")
    return _plain_apply.__get__(None, cls)(*args, **kwargs)


def _no_backward_hooks(module: nn.Module, args: Any) -> None:
    if (module._backward_hooks or module._backward_pre_hooks) and _is_traced((args, list(module.parameters()))):
        raise NotTracedError("a module's backward hook is no operation of a graph")


# Sizes of a traced model's tensors stay symbolic where plain Python would make numbers of them: ``len(x)`` is a number
# in Python, and so is ``torch.div`` of two sizes a tensor. What cannot do without knowing how many samples there are in
# a micro-batch, such as a loop over them, stops the capture at that line.


def _len(x: Any, /) -> Any:
    symbolic = isinstance(x, Tensor) and x.dim() and isinstance(x.shape[0], torch.SymInt)
    return x.shape[0] if symbolic else _plain_len(x)


def _divided(a: Any, b: Any, *, rounding_mode: str | None = None, **kwargs: Any) -> Any:
    if rounding_mode not in ("trunc", "floor"):
        return torch.div(a, b, rounding_mode=rounding_mode, **kwargs)
    same_sign = isinstance(a, torch.SymInt) or (a >= 0) == (b > 0)
    return a // b if rounding_mode == "floor" or same_sign else math.trunc(a / b)


def _set_replacement(env: ShapeEnv, symbol: Any, by: Any, *args: Any) -> None:
    sources = getattr(env, "var_to_sources", {}).get(symbol, ()) if by.is_number else ()
    names = (source.name() if callable(source.name) else str(source.name) for source in sources)
    if any(name.endswith("size()[0]") for name in names):  # as in L['x'].size()[0]
        raise NotTracedError("what is done here needs to know how many samples a micro-batch has")
    _plain_set_replacement(env, symbol, by, *args)


# Lists of a batch's samples that a model puts together again, as LLaVA does with the features of its images.
#
# ``list(x)`` of a tensor asks for as many tensors as there are samples, so a traced model would fit micro-batches of
# one size only. While a model is traced, the list holds stand-ins, and ``torch.cat`` or ``torch.stack`` of all of them
# is a reshape of ``x``. A model may return stand-ins beside its results; what else is done with one stops the capture.
# What the model does with the list's length cannot be noticed here; ``capture`` therefore captures for another number
# of samples too, and compares.
class _Sample:
    """Stands for sample ``number`` of ``whole``."""

    def __init__(self, whole: Tensor, number: int) -> None:
        self.whole, self.number = whole, number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole, dim = _joined(*args, **(kwargs or {})) if func in (torch.cat, torch.stack) else (None, 0)
        if whole is None:
            raise NotTracedError(f"{getattr(func, '__name__', func)} of single samples of a micro-batch")
        if func is torch.stack:
            return whole.movedim(0, dim)
        if dim < 0:
            dim += whole.dim() - 1
        return whole.movedim(0, dim).flatten(dim, dim + 1)

    def __getitem__(self, index: Any) -> Any:
        raise NotTracedError("it indexes single samples of a micro-batch")

    def __getattr__(self, name: str) -> Any:
        raise NotTracedError(f"it reads {name} of single samples of a micro-batch")


def without_stand_ins(returned: Any) -> Any:
    """Return what a model returns with None in place of stand-ins, which are no results of a graph."""
    return pytree.tree_map(lambda x: None if isinstance(x, _Sample) else x, returned)


def _joined(tensors: Any, dim: int = 0) -> tuple[Tensor | None, int]:
    """Return the tensor whose samples these are, all and in order; None if they are not."""
    if not isinstance(tensors, Sequence) or not isinstance(tensors[0], _Sample):
        return None, dim
    whole = tensors[0].whole
    own = all(isinstance(t, _Sample) and t.whole is whole and t.number == n for n, t in enumerate(tensors))
    return (whole if own and len(tensors) == _hint(whole) else None), dim


def _hint(whole: Tensor) -> int | None:
    """Return the number of samples in the example; None where it depends on values."""
    samples = whole.shape[0]
    return samples.node.hint if isinstance(samples, torch.SymInt) else samples


# Modules that are cast to another precision in a forward, as the routers of Switch Transformers are.
#
# Casting a module replaces its parameters for good, which an exported graph cannot do. While a model is traced, such a
# module computes with cast copies of its parameters instead; they themselves keep the precision that the job asks for.
@contextmanager
def _module_casts() -> Iterator[None]:
    """Make ``module.to(dtype)`` a cast of copies inside the block."""
    forwards: list[tuple[nn.Module, Any]] = []

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, *_ = _parse_to(*args, **kwargs)
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        floating = {name: t for name, t in values.items() if t.is_floating_point()}
        if dtype is None or all(t.dtype == dtype for t in floating.values()):
            return module
        own = module.__dict__.get("forward")
        forwards.append((module, own))

        def forward(*inputs: Any, **named: Any) -> Any:
            cast = {name: t.to(dtype) for name, t in floating.items()}
            _put(module, own)
            try:
                return torch.func.functional_call(module, cast, inputs, named)
            finally:
                module.__dict__["forward"] = forward

        module.__dict__["forward"] = forward
        return module

    try:
        with _replaced((nn.Module, "to", to)):
            yield
    finally:
        for module, own in reversed(forwards):
            _put(module, own)


def _put(module: nn.Module, forward: Any) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward


def _alpha_dropout(
    channels: bool, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Make a call of alpha dropout a single operation."""
    return alpha_dropout(input, p, channels) if training and p else input


def fake_parameters(module: nn.Module, fake: FakeTensorMode) -> AbstractContextManager[None]:
    """Replace a module's parameters by fake ones on the CPU inside the block; tied parameters stay tied."""

    def made(parameter: nn.Parameter) -> nn.Parameter:
        with fake:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        return nn.Parameter(empty, parameter.requires_grad)

    return stand_ins(module, made)
