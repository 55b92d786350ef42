"""Opaque modules: submodules that ``torch.export`` cannot trace run as they are, as one operation of the graph.

During export, the forward of such a module is one call of the operator ``raypipe::module``. The shapes of its results
come from trial runs of the module alone. In a stage, the module itself is called.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raypipe.capture.patches.structures import as_plain, like
from raypipe.errors import CaptureError
from raypipe.graph.calls import Call

TARGET = "raypipe.module.default"
WHOLE = ""
"""Path of the whole model, where it is one opaque module."""
PLAIN = (bool, int, float, str, type(None))
LARGER: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n)
"""Sizes of the second trial run; twice as large where a length must be a multiple of something."""


class CannotRunAloneError(CaptureError):
    """The module at ``path`` cannot be captured, nor run alone, to learn the shapes of its results."""

    @property
    def path(self) -> str:
        """The module's path."""
        return self.where.removeprefix("module ")


class _Result(NamedTuple):
    """One result of an opaque module; each size is a number, or the (input, dimension) that it equals."""

    shape: tuple[int | tuple[int, int], ...]
    dtype: torch.dtype


_results: dict[str, list[_Result]] = {}
"""Results of the opaque modules under export, by path."""


@torch.library.custom_op("raypipe::module", mutates_args=())
def module(path: str, call: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Represents the call of an opaque module in an exported graph; it is traced but never run."""
    raise RuntimeError(f"module {path} is not called through its operator")


@module.register_fake
def _fake(path: str, call: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.empty(
            [d if isinstance(d, int) else inputs[d[0]].shape[d[1]] for d in result.shape], dtype=result.dtype,
            device=inputs[0].device,
        )
        for result in _results[path]
    ]  # fmt: skip


@contextmanager
def opaque_modules(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Make the modules at these paths appear as single operators when the model is traced inside the block."""
    copies = {path: _real_copy(model.get_submodule(path)) for path in paths}
    try:
        for path in paths:
            part = model.get_submodule(path)
            part.forward = _traced(path, part, copies[path])
        yield
    finally:
        for path in paths:
            model.get_submodule(path).__dict__.pop("forward", None)
            _results.pop(path, None)


def _real_copy(part: nn.Module) -> nn.Module:
    """Copy a module and give it real parameters with small random values, to find the shapes of its results."""
    real = copy.deepcopy(part)
    generator = torch.Generator().manual_seed(0)
    for owner in real.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                value = torch.randn(parameter.shape, generator=generator).mul_(0.02).to(parameter.dtype)
                owner._parameters[name] = nn.Parameter(value, parameter.requires_grad)
    return real


def _traced(path: str, part: nn.Module, real: nn.Module) -> Any:
    signature = inspect.signature(part.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        bad = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))), None)
        if bad is not None or not tensors:
            what = f"a {type(bad).__name__}" if bad is not None else "no tensor at all"
            raise CannotRunAloneError(
                f"module {path}", f"cannot be captured, and is called with {what}", "pass it tensors"
            )
        noticed = _Draws()  # type: ignore[no-untyped-call]
        results, returned = _trial(path, real, leaves, structure, tensors, noticed)
        plain, returns = pytree.tree_flatten(as_plain(returned))
        _results[path] = results
        call = {"args": _written(args, tensors), "kwargs": _written(kwargs, tensors), "draws": noticed.found,
                "learns": _learns(part)}  # fmt: skip
        found = torch.ops.raypipe.module(path, json.dumps(call), tensors, list(part.parameters()))
        results_in_order = iter(found)
        filled = [next(results_in_order) if isinstance(x, Tensor) else x for x in plain]
        return like(returned, returns.unflatten(filled))

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether a module draws random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or (torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args))
        return func(*args, **(kwargs or {}))


def _without_dropout(func: Any, args: Sequence[Any]) -> bool:
    """Return whether this is attention without dropout, which torch marks as drawing like attention with it."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return len(args) <= place or not args[place]


def _learns(part: nn.Module) -> bool:
    """Return whether the module has a batch norm that updates running statistics."""
    return any(
        isinstance(inner, _BatchNorm) and inner.training and inner.track_running_stats for inner in part.modules()
    )


def learns(call: Call) -> bool:
    """Return whether this call of an opaque module updates running statistics."""
    return bool(json.loads(call.args[1])["learns"])


def _trial(
    path: str, real: nn.Module, leaves: Sequence[Any], structure: Any, tensors: Sequence[Tensor], noticed: _Draws
) -> tuple[list[_Result], Any]:
    """Find the module's results and an example of what it returns, by running its real copy on inputs of two sizes.

    Raises:
        CaptureError: it cannot run alone, returns other things than tensors, or a result's size depends on more than
            one size of its inputs.
    """
    sizes = [[_size(d, lambda n: n) for d in tensor.shape] for tensor in tensors]
    one = _run(path, real, leaves, structure, [t.dtype for t in tensors], sizes, noticed)
    other_sizes, two = sizes, one
    for number, larger in enumerate(LARGER):
        other_sizes = [[_size(d, larger) for d in tensor.shape] for tensor in tensors]
        try:
            two = _run(path, real, leaves, structure, [t.dtype for t in tensors], other_sizes, noticed)
            break
        except CannotRunAloneError:
            if number == len(LARGER) - 1:
                raise
    kept, again = (pytree.tree_leaves(as_plain(run)) for run in (one, two))
    others = [[x for x in found if not isinstance(x, Tensor)] for found in (kept, again)]
    if not all(isinstance(x, PLAIN) for x in others[0]) or others[0] != others[1]:
        why = "cannot be captured, and returns more than tensors"
        raise CannotRunAloneError(f"module {path}", why, "return tensors")
    places = [(k, d) for k, size in enumerate(sizes) for d in range(len(size))]
    results = []
    for small, large in zip(kept, again, strict=True):
        if not isinstance(small, Tensor):
            continue
        dims: list[int | tuple[int, int]] = []
        for a, b in zip(small.shape, large.shape, strict=True):
            same = [(k, d) for k, d in places if (sizes[k][d], other_sizes[k][d]) == (a, b)]
            if a != b and not same:
                why = f"cannot be captured, and its result's size {a} equals no size of its inputs"
                raise CannotRunAloneError(f"module {path}", why, "write its forward with operations on tensors only")
            dims.append(a if a == b else same[0])
        results.append(_Result(tuple(dims), small.dtype))
    return results, one


def _run(
    path: str, real: nn.Module, leaves: Sequence[Any], structure: Any, kinds: Sequence[torch.dtype],
    sizes: Sequence[Sequence[int]], noticed: _Draws,
) -> Any:  # fmt: skip
    """Return what the real copy of a module makes of random inputs of these sizes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng([]):
        given = iter([_drawn(s, k) for s, k in zip(sizes, kinds, strict=True)])
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], structure)
        try:
            with noticed:
                return type(real).forward(real, *args, **kwargs)
        except Exception as error:
            raise CannotRunAloneError(
                f"module {path}", f"cannot be captured, nor run alone on random numbers: {error}",
                "write its forward with operations on tensors only",
            ) from error  # fmt: skip


def _size(size: int | torch.SymInt, larger: Callable[[int], int]) -> int:
    return larger(int(size.node.hint)) if isinstance(size, torch.SymInt) else size


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make random floats, or integer zeros, which are valid indices everywhere."""
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _written(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Encode arguments as plain data, with tensors by their position."""
    if isinstance(value, Tensor):
        return {"tensor": next(i for i, t in enumerate(tensors) if t is value)}
    if isinstance(value, Mapping):
        return {"mapping": {key: _written(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_written(item, tensors) for item in value]}
    return {"value": value}


def arguments(call: str, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode the positional and keyword arguments of an opaque module's call; ``tensors`` are its tensors in order."""
    decoded = json.loads(call)
    return _read(decoded["args"], tensors), _read(decoded["kwargs"], tensors)


def _read(value: Any, tensors: Sequence[Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "mapping":
        return {key: _read(item, tensors) for key, item in content.items()}
    if kind in ("list", "tuple"):
        items = [_read(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content


def flat_results(returned: Any) -> list[Tensor]:
    """Flatten what a module returns to the order of its operator's results."""
    return [x for x in pytree.tree_leaves(as_plain(returned)) if isinstance(x, Tensor)]
