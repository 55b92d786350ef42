"""Opaque modules: submodules that ``torch.export`` cannot trace run as they are, as one operation of the graph.

During export, the forward of such a module is one call of the operator ``raypipe::module``. The shapes of its results
come from trial runs of the module alone: on made-up inputs, or for the whole model on rows of the data if there are
some; those of divided experts are known. In a stage, the module itself is called, with its hooks.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypipe.capture.captured import ROWS
from raypipe.compat.torch_private import DisableTorchFunction, TorchDispatchMode, _BatchNorm, _disable_current_modes
from raypipe.compat.torch_private import _pytree as pytree
from raypipe.errors import CaptureError
from raypipe.files import short
from raypipe.graph.operations import Operation
from raypipe.tensor.experts import ExpertsParallel, is_experts

TARGET = "raypipe.module.default"
WHOLE = ""
"""Path of the whole model, where it is one opaque module."""
PLAIN = (bool, int, float, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps hooks that run with its forward or its backward."""
LARGER: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n)
"""Sizes of the second trial run; twice as large where a length must be a multiple of something."""


class CannotRunAloneError(CaptureError):
    """The module at ``path`` cannot be captured, nor run alone, to learn the shapes of its results."""

    @property
    def path(self) -> str:
        """The module's path."""
        return self.where.removeprefix("module ")


class _Result(NamedTuple):
    """One result of an opaque module; each size is a number, or the (input, dimension) that it equals.

    There is no shape where a size follows from values: only of a whole model, which then returns None in its place.
    """

    shape: tuple[int | tuple[int, int], ...] | None
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
            [d if isinstance(d, int) else inputs[d[0]].shape[d[1]] for d in result.shape or ()],
            dtype=result.dtype,
            device=inputs[0].device,
        )
        for result in _results[path]
    ]


@contextmanager
def opaque_modules(model: nn.Module, paths: Sequence[str], rows: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Make the modules at these paths appear as single operators when the model is traced inside the block.

    ``rows`` are ``ROWS`` rows of the data by the model's arguments, if there are any: the whole model is tried on them.
    """
    parts = {path: model.get_submodule(path) for path in paths}
    # Real values of experts would take as much memory as nearly the whole model.
    copies = {path: None if isinstance(part, ExpertsParallel) else _real_copy(part) for path, part in parts.items()}
    hooks = {path: {name: model.get_submodule(path).__dict__[name] for name in HOOKS} for path in paths}
    try:
        for path in paths:
            part = model.get_submodule(path)
            part.forward = _traced(path, part, copies[path], rows if path == WHOLE else None)
            part.__dict__.update({name: type(own)() for name, own in hooks[path].items()})  # the trials call them
        yield
    finally:
        for path in paths:
            model.get_submodule(path).__dict__.pop("forward", None)
            model.get_submodule(path).__dict__.update(hooks[path])
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


def _traced(path: str, part: nn.Module, real: nn.Module | None, rows: Mapping[str, Tensor] | None) -> Any:
    """Return the forward of a module under export; ``real``: its copy for trials, or None if it is one of experts."""
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
        given = None if rows is None else [rows[name] for name in _names(signature, args, kwargs)]
        if real is None:  # one row for each of the tokens
            results, returned, alone = [_Result(((0, 0), (0, 1)), tensors[0].dtype)], tensors[0], False
        else:
            results, returned, alone = _trial(path, real, leaves, structure, tensors, noticed, given)
        plain, returns = pytree.tree_flatten(as_plain(returned))
        _results[path] = results
        call = {
            "args": _written(args, tensors),
            "kwargs": _written(kwargs, tensors),
            "draws": noticed.found,
            "learns": _learns(part),
            "alone": alone,
            "by_row": is_experts(part),
        }
        found = torch.ops.raypipe.module(path, json.dumps(call), tensors, list(part.parameters()))
        results_in_order = iter([None if r.shape is None else t for r, t in zip(results, found, strict=True)])
        filled = [next(results_in_order) if isinstance(x, Tensor) else x for x in plain]
        return like(returned, returns.unflatten(filled))

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _names(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the arguments that are tensors, in the order in which pytrees have them."""
    given = dict(zip(signature.parameters, args, strict=False))
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    for path, value in pytree.tree_flatten_with_path(dict(kwargs))[0]:
        if isinstance(value, Tensor) and isinstance(path[0], pytree.MappingKey):
            names.append(path[0].key)
    yield from names


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


def keeps_tensors_alone(call: str) -> bool:
    """Return whether of what the module of this call returns only tensors are kept."""
    return bool(json.loads(call)["alone"])


def learns(operation: Operation) -> bool:
    """Return whether this call of an opaque module updates running statistics."""
    return bool(json.loads(operation.args[1])["learns"])


def _trial(
    path: str,
    real: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    tensors: Sequence[Tensor],
    noticed: _Draws,
    rows: Sequence[Tensor] | None,
) -> tuple[list[_Result], Any, bool]:
    """Find the module's results and an example of what it returns, by running its real copy on inputs of two sizes.

    The last value says whether only its tensors are kept (``tensors_alone``).

    The inputs are the first two of ``rows``, and all of them; without rows they are made up.

    Raises:
        CaptureError: it cannot run alone, returns other things than tensors, or a result's size depends on more than
            one size of its inputs.
    """
    what = "random numbers" if rows is None else "rows of the data"
    run = partial(_run, path, real, leaves, structure, noticed, what)
    if rows is not None:
        with _disable_current_modes():
            many = [t.to(like.dtype) for t, like in zip(rows, tensors, strict=True)]
            few = [t[: ROWS - 1] for t in many]
        sizes, other_sizes = ([list(t.shape) for t in given] for given in (few, many))
        one, two = run(few), run(many)
    else:
        sizes = [[_size(d, lambda n: n) for d in tensor.shape] for tensor in tensors]
        one = run(_drawn(sizes, tensors))
        other_sizes, two = sizes, one
        for number, larger in enumerate(LARGER):
            other_sizes = [[_size(d, larger) for d in tensor.shape] for tensor in tensors]
            try:
                two = run(_drawn(other_sizes, tensors))
                break
            except CannotRunAloneError:
                if number == len(LARGER) - 1:
                    raise
    fits, alone = _alike(one, two), False
    if not fits and path == WHOLE:  # its outputs are the tensors that it returns itself, not in lists of samples
        one, two, alone = tensors_alone(one), tensors_alone(two), True
        fits = _alike(one, two)
    if not fits:
        why = "cannot be captured, and returns more than tensors"
        raise CannotRunAloneError(f"module {path}", why, "return tensors")
    kept, again = (pytree.tree_leaves(as_plain(run)) for run in (one, two))
    places = [(k, d) for k, size in enumerate(sizes) for d in range(len(size))]
    results, unknown = [], list[int]()
    for small, large in zip(kept, again, strict=True):
        if not isinstance(small, Tensor):
            continue
        dims: list[int | tuple[int, int]] = []
        explained = small.dim() == large.dim()
        for a, b in zip(small.shape, large.shape, strict=explained):
            same = [(k, d) for k, d in places if (sizes[k][d], other_sizes[k][d]) == (a, b)]
            explained = explained and (a == b or bool(same))
            if not explained:
                unknown.append(a)
                break
            dims.append(a if a == b else same[0])
        results.append(_Result(tuple(dims) if explained else None, small.dtype))
    if unknown and (path != WHOLE or all(result.shape is None for result in results)):
        why = f"cannot be captured, and its result's size {unknown[0]} equals no size of its inputs"
        raise CannotRunAloneError(f"module {path}", why, "write its forward with operations on tensors only")
    return results, one, alone


def _alike(one: Any, two: Any) -> bool:
    """Return whether both are made of tensors in the same places, and of the same plain values beside them."""
    found, structures = zip(*(pytree.tree_flatten(as_plain(run)) for run in (one, two)), strict=True)
    others = [[None if isinstance(x, Tensor) else x for x in leaves] for leaves in found]
    return (
        bool(structures[0] == structures[1]) and all(isinstance(x, PLAIN) for x in others[0]) and others[0] == others[1]
    )


def tensors_alone(returned: Any) -> Any:
    """Return what a model returns with None in place of all that is no tensor."""
    plain = as_plain(returned)
    if isinstance(plain, Mapping):
        return {name: x if isinstance(x, Tensor) else None for name, x in plain.items()}
    return [x if isinstance(x, Tensor) else None for x in plain] if isinstance(plain, list | tuple) else plain


def _run(
    path: str,
    real: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    noticed: _Draws,
    what: str,
    inputs: Sequence[Tensor],
) -> Any:
    """Return what the real copy of a module makes of these inputs."""
    where = f"module {path}" if path != WHOLE else "the model"
    with _disable_current_modes(), DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng([]):
        given = iter([t.clone() for t in inputs])
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], structure)
        before = {name: (buffer, buffer._version) for name, buffer in _kept_buffers(real)}
        hooked = any(real.__dict__[name] for name in HOOKS)
        try:
            with noticed:
                found = real(*args, **kwargs) if hooked else type(real).forward(real, *args, **kwargs)
        except Exception as error:
            said = short(next(iter(str(error).splitlines()), type(error).__name__), 300)
            why = f"cannot be captured, nor run alone on {what}: {said}"
            fix = "write its forward with operations on tensors only"
            raise CannotRunAloneError(f"module {path}", why, fix) from error
    for name, buffer in _kept_buffers(real):
        if name not in before or before[name][0] is not buffer or before[name][1] != buffer._version:
            why = f"cannot be captured, and writes its buffer {name} in a forward, so results would depend on the plan"
            raise CaptureError(where, why, "keep it out of the forward")
    return found


def _kept_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return a module's buffers but for those of batch norms, which are checked elsewhere."""
    for path, part in module.named_modules():
        if not isinstance(part, _BatchNorm):
            yield from part.named_buffers(prefix=path, recurse=False)


def _size(size: int | torch.SymInt, larger: Callable[[int], int]) -> int:
    return larger(int(size.node.hint)) if isinstance(size, torch.SymInt) else size


def _drawn(sizes: Sequence[Sequence[int]], like: Sequence[Tensor]) -> list[Tensor]:
    """Make tensors of these sizes and dtypes: random floats, or integer zeros, which are valid indices everywhere."""
    with _disable_current_modes(), torch.random.fork_rng([]):
        return [
            torch.randn(size, dtype=t.dtype) if t.dtype.is_floating_point else torch.zeros(size, dtype=t.dtype)
            for size, t in zip(sizes, like, strict=True)
        ]


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


def flat_results(returned: Any, alone: bool = False) -> list[Tensor]:
    """Flatten what a module returns to the order of its operator's results; ``alone``: only its tensors are kept."""
    if alone:
        returned = tensors_alone(returned)
    return [x for x in pytree.tree_leaves(as_plain(returned)) if isinstance(x, Tensor)]


# What models are given and return, taken apart into tensors and put together again.
#
# torch's pytrees know dicts, lists, tuples, named tuples, and classes that somebody has registered. A model may return
# an instance of any dataclass (as diffusers' do, which are ordered dicts at the same time) or of another mapping.


def as_plain(value: Any) -> Any:
    """Return ``value`` with dicts in place of the dataclasses and mappings in it that torch's pytrees do not know."""
    return pytree.tree_map(_plain, value)


def _plain(value: Any) -> Any:
    parts = _parts(value)
    return value if parts is None else {name: as_plain(part) for name, part in parts.items()}


def like(example: Any, plain: Any) -> Any:
    """Return what ``as_plain(example)`` would be made of, with the values of ``plain``.

    An instance is made by its class of its fields, or of one dict; where its class cannot, it stays a dict.
    """
    leaves, structure = pytree.tree_flatten(example)
    return structure.unflatten(
        [_like(old, new) for old, new in zip(leaves, structure.flatten_up_to(plain), strict=True)]
    )


def _like(example: Any, plain: Any) -> Any:
    parts = _parts(example)
    if parts is None:
        return plain
    made = {name: like(part, plain[name]) for name, part in parts.items()}
    try:
        return type(example)(made) if not is_dataclass(example) else replace(example, **made)  # type: ignore[type-var]
    except Exception:  # of a class with a constructor of its own
        return made


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or the items of a mapping; None of anything else."""
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else None


# Alpha dropout is one operation of a graph as well. The exporter takes it apart where a model also writes in place, and
# of the parts nobody could tell what they do in evaluation, where alpha dropout is the identity.


@torch.library.custom_op("raypipe::alpha_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def alpha_dropout(x: Tensor, p: float, channels: bool) -> Tensor:
    """Represents alpha dropout, of whole channels or not, in an exported graph; it is traced but never run."""
    raise RuntimeError("alpha dropout is not called through its operator")


@alpha_dropout.register_fake
def _fake_alpha_dropout(x: Tensor, p: float, channels: bool) -> Tensor:
    return torch.empty_like(x)


ALPHA_DROPOUT = alpha_dropout._opoverload
"""The operation in a graph."""
