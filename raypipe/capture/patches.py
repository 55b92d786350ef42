"""Patches of torch while a model is traced, so that more models can be captured and none with other gradients.

Each is a context manager; all that they replace is as before when the block ends.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook

from raypipe.capture.alpha_dropout import alpha_dropout


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


# Functions with a backward of their own (``torch.autograd.Function``), which an exported graph would forget.
#
# The exporter records what their forward does, and autograd would derive that, which is another gradient wherever the
# backward is an estimate or a bound (YOSO, RecurrentGemma). Such a call stops the capture, so its module runs as it is.
# A checkpoint in torch's older form is one too; its backward is the derivative, and it is traced as what it calls.
DERIVATIVES = {"transformers.models.bloom.modeling_bloom.GeLUFunction"}
"""Functions whose backward is the derivative of their forward, so that it does not matter which is used."""


class OwnBackwardError(Exception):
    """A function that is being traced has a backward of its own."""


@contextmanager
def own_backwards() -> Iterator[None]:
    """Stop at calls of such functions inside the block, but for torch's own."""
    plain = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *operands = args  # what it recomputes is the plan's to choose
            return function(*operands)
        traced = any(type(t) not in (Tensor, nn.Parameter) for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
        name = f"{cls.__module__}.{cls.__qualname__}"
        if traced and not name.startswith("torch.") and name not in DERIVATIVES:
            raise OwnBackwardError(f"{cls.__name__} has a backward of its own, which a captured graph would not use")
        return plain.__get__(None, cls)(*args, **kwargs)

    with _replaced((Function, "apply", classmethod(apply))):
        yield


# What a forward does to gradients beside its operations: hooks on tensors, on modules, and derivatives of its own.
#
# The exporter records none of these, so a captured graph would train with other gradients. Where a traced model adds a
# hook to a tensor, calls a module that has backward hooks, or asks autograd for a derivative, the capture stops, so
# that the module runs as it is.
class GradientHookError(Exception):
    """A forward that is being traced does something to gradients that is no operation."""


@contextmanager
def gradient_hooks() -> Iterator[None]:
    """Stop at hooks on gradients and at derivatives inside the block."""
    replaced: list[tuple[Any, str, str]] = [
        (Tensor, "register_hook", "a tensor's hook on its gradient"),
        (BackwardHook, "setup_input_hook", "a module's backward hook"),
        (torch.autograd, "grad", "a derivative taken in a forward"),
        (torch.autograd, "backward", "a backward inside a forward"),
    ]
    changes = [(owner, name, _stopping(getattr(owner, name), what)) for owner, name, what in replaced]
    with _replaced(*changes):
        yield


def _stopping(plain: Any, what: str) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):  # not in a trial run
            raise GradientHookError(f"{what} is no operation of a graph")
        return plain(*args, **kwargs)

    return called


# Sizes of a traced model's tensors stay symbolic where plain Python would make numbers of them.
#
# ``len(x)`` is a number in Python, and so is ``torch.div`` of two sizes a tensor. While a model is traced they are the
# symbolic sizes that ``x.shape[0]`` and ``//`` give. What cannot do without knowing how many samples a micro-batch has,
# such as a loop over them, stops the capture at that line; its module then runs as it is.
SIZE = (int, torch.SymInt)


class FixedSamplesError(Exception):
    """A model's code would fit micro-batches of one size only."""

    def __init__(self) -> None:
        super().__init__("what is done here needs to know how many samples a micro-batch has")


@contextmanager
def symbolic_sizes() -> Iterator[None]:
    """Keep sizes symbolic inside the block, and stop where the number of samples would become fixed."""
    length, divide, fix = builtins.len, torch.div, ShapeEnv._set_replacement

    def symbolic_len(x: Any, /) -> Any:
        if isinstance(x, Tensor) and x.dim() and isinstance(x.shape[0], torch.SymInt):
            return x.shape[0]
        return length(x)

    def div(a: Any, b: Any, *args: Any, rounding_mode: str | None = None, **kwargs: Any) -> Any:
        if isinstance(a, SIZE) and isinstance(b, SIZE) and rounding_mode in ("trunc", "floor"):
            return a // b if rounding_mode == "floor" or _same_sign(a, b) else math.trunc(a / b)
        return divide(a, b, *args, rounding_mode=rounding_mode, **kwargs)

    def watched(env: ShapeEnv, symbol: Any, by: Any, *args: Any) -> None:
        if by.is_number and any(name.endswith("size()[0]") for name in _sources(env, symbol)):
            raise FixedSamplesError
        fix(env, symbol, by, *args)

    changes = (builtins, "len", symbolic_len), (torch, "div", div), (ShapeEnv, "_set_replacement", watched)
    with _replaced(*changes):
        yield


def _same_sign(a: Any, b: Any) -> bool:
    return isinstance(a, torch.SymInt) or (a >= 0) == (b > 0)


def _sources(env: ShapeEnv, symbol: Any) -> list[str]:
    """Return where a symbol's value comes from: ``L['x'].size()[0]`` of an input."""
    found = getattr(env, "var_to_sources", {}).get(symbol, ())
    return [source.name() if callable(source.name) else str(source.name) for source in found]


# Lists of a batch's samples that a model puts together again, as LLaVA does with the features of its images.
#
# ``list(x)`` of a tensor asks for as many tensors as there are samples, so a traced model would fit micro-batches of
# one size only. While a model is traced, the list holds stand-ins, and ``torch.cat`` or ``torch.stack`` of all of them
# is a reshape of ``x``. A model may return stand-ins beside its results; what else is done with one stops the capture.
# What the model does with the list's length cannot be noticed here; ``capture`` therefore captures for another number
# of samples too, and compares.
class ListedSamplesError(Exception):
    """A model does more with a list of its samples than putting it together again."""


class _Sample:
    """Stands for sample ``number`` of ``whole``."""

    def __init__(self, whole: Tensor, number: int) -> None:
        self.whole, self.number = whole, number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole, dim = _joined(*args, **(kwargs or {})) if func in (torch.cat, torch.stack) else (None, 0)
        if whole is None:
            raise ListedSamplesError(f"{getattr(func, '__name__', func)} of single samples of a micro-batch")
        if func is torch.stack:
            return whole.movedim(0, dim)
        if dim < 0:
            dim += whole.dim() - 1
        return whole.movedim(0, dim).flatten(dim, dim + 1)

    def __getitem__(self, index: Any) -> Any:
        raise ListedSamplesError("it indexes single samples of a micro-batch")

    def __getattr__(self, name: str) -> Any:
        raise ListedSamplesError(f"it reads {name} of single samples of a micro-batch")


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


@contextmanager
def listed_samples(samples: int, used: list[str]) -> Iterator[None]:
    """Let lists of all ``samples`` hold stand-ins inside the block; ``used`` gets an entry for each such list."""
    iterate, length = Tensor.__iter__, Tensor.__len__

    def ours(whole: Tensor) -> bool:
        return bool(whole.dim()) and isinstance(whole.shape[0], torch.SymInt) and _hint(whole) == samples

    def stand_ins(whole: Tensor) -> Iterator[Any]:
        if not ours(whole):
            return iterate(whole)  # type: ignore[no-any-return, no-untyped-call]
        used.append(str(whole.shape))
        return iter([_Sample(whole, number) for number in range(samples)])

    def hint(whole: Tensor) -> int:  # list() asks for it
        return samples if ours(whole) else length(whole)  # type: ignore[no-untyped-call]

    with _replaced((Tensor, "__iter__", stand_ins), (Tensor, "__len__", hint)):
        yield


# Modules that are cast to another precision in a forward, as the routers of Switch Transformers are.
#
# Casting a module replaces its parameters for good, which an exported graph cannot do. While a model is traced, such a
# module computes with cast copies of its parameters instead; they themselves keep the precision that the job asks for.
@contextmanager
def module_casts() -> Iterator[None]:
    """Make ``module.to(dtype)`` a cast of copies inside the block."""
    forwards: list[tuple[nn.Module, Any]] = []

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
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


@contextmanager
def whole_alpha_dropout() -> Iterator[None]:
    """Make calls of alpha dropout single operations (``alpha_dropout``) inside the block."""

    def elements(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return alpha_dropout(input, p, False) if training and p else input

    def whole_channels(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return alpha_dropout(input, p, True) if training and p else input

    with _replaced((F, "alpha_dropout", elements), (F, "feature_alpha_dropout", whole_channels)):
        yield


@contextmanager
def undecided_masks() -> Iterator[None]:
    """Stop ``nn.TransformerEncoder`` and ``Decoder`` from looking at a mask's values to learn whether it is causal.

    They only pass the answer on as a hint beside the mask; ``attention_masks`` decides it after the capture.
    """
    with _replaced((transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True)):
        yield


@contextmanager
def fake_parameters(module: nn.Module, fake: FakeTensorMode) -> Iterator[None]:
    """Replace a module's parameters by fake ones on the CPU inside the block; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    restore: list[Callable[[], None]] = []

    def swap(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in made:
            with fake:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        part._parameters[name] = made[id(parameter)]
        restore.append(lambda: part._parameters.__setitem__(name, parameter))

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                swap(part, name, parameter)
    try:
        yield
    finally:
        for undo in restore:
            undo()
