"""Start values of a module's parameters, drawn by key, for only those parameters that a stage holds.

Only a module's constructor knows its start values, so it runs once more on each stage, with two changes. Parameters of
other stages go to the meta device as soon as they are made. And the n-th random draw uses a generator seeded with
(seed, n); numpy's and Python's generators begin at the seed. The constructor makes the same draws in the same order on
every stage (draws on the meta device cost nothing), so a parameter's start values do not depend on the stage that holds
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from raypipe.capture.meta import (
    build_on_meta,
    loading_nothing,
    needs_values,
    patching,
    registrations,
    same_randomness,
)
from raypipe.compat.torch_private import TorchDispatchMode
from raypipe.errors import SpecError
from raypipe.models.keyed_random import fold64


class StartValues(Protocol):
    """A source of start values."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the user should know of them before a run starts."""

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return values of all these parameters, and of those buffers whose value differs from the constructor's."""


class Constructed:
    """The start values that a module's constructor draws.

    ``build`` returns the module; it is called once without memory to learn the parameters' order, and once per stage.
    """

    notices = ()

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build
        self._skeleton: _Skeleton | None = None

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return the values on the CPU in the constructor's dtype.

        At most one other parameter is allocated, and the original of each that is a copy (as ``nn.TransformerEncoder``
        makes its layers). If a value is computed from a parameter that the constructor discards (parametrizations),
        those are allocated too; if it is computed from one that another stage holds, all are.
        """
        known = self._skeleton = self._skeleton or _learn(self.build)
        wanted = known.originals(frozenset(known.numbers[name] for name in parameters))
        for kept in (wanted, wanted | known.discarded, None):
            try:
                values = self._values(parameters, kept, seed)
            except Exception as error:  # also one that a source of models has made of torch's
                if kept is None or not needs_values(error):
                    raise
                continue
            if not any(value.is_meta for value in values.values()):
                return values
        name = next(name for name, value in values.items() if value.is_meta)
        why = f"its constructor gives {name} no value: it is on the meta device"
        raise SpecError("model", why, "construct it on the CPU")

    def _values(self, parameters: Collection[str], kept: frozenset[int] | None, seed: int) -> dict[str, Tensor]:
        with (
            registrations(kept),
            same_randomness(seed),
            loading_nothing(),
            _same_draws(),
            _KeyedDraws(seed),
        ):
            module = self.build()
        made_parameters = dict(module.named_parameters(remove_duplicate=False))
        return {name: made_parameters[name].detach() for name in parameters}


class _Skeleton(NamedTuple):
    """The way a constructor treats parameters, learnt from running it without memory."""

    numbers: dict[str, int]
    """Per parameter name, the number of the registration that first made it; tied names share one."""
    copied_from: dict[int, int]
    discarded: frozenset[int]
    """Parameters that are made, but are not the finished module's."""

    def originals(self, wanted: frozenset[int]) -> frozenset[int]:
        """Add the parameters that the wanted ones are copies of."""
        result = set(wanted)
        for number in wanted:
            while number in self.copied_from:
                number = self.copied_from[number]
                result.add(number)
        return frozenset(result)


def _learn(build: Callable[[], nn.Module]) -> _Skeleton:
    """Run a constructor without keeping what it makes.

    Raises:
        SpecError: it makes parameters that no start value can be drawn for.
    """
    try:
        module, made = build_on_meta(build)
    except Exception as error:  # also one that a source of models has made of torch's
        if not needs_values(error):
            raise
        with registrations(None) as made, same_randomness(0):
            module = build()
    first = {id(parameter): number for number, parameter in reversed(list(enumerate(made.parameters)))}
    numbers = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in first:
            why = f"its constructor makes {name} without registering it, so its start value cannot be drawn by key"
            raise SpecError("model", why, "assign it as an attribute, or call register_parameter")
        numbers[name] = first[id(parameter)]
    return _Skeleton(numbers, made.copied_from, frozenset(range(len(made.parameters))) - set(numbers.values()))


@contextmanager
def _same_draws() -> Iterator[None]:
    """Make the functions of ``torch.nn.init`` draw alike on every device.

    ``orthogonal_`` and ``sparse_`` draw nothing on the meta device, and ``trunc_normal_`` redraws until all values are
    within the bounds, which depends on values that the meta device does not have. Start values of later parameters
    would then depend on what the stage holds. So ``trunc_normal_`` inverts the distribution with one draw, and the
    other two get code that draws before it asks for the device. Their code is replaced rather than their names, under
    which other modules may have imported them.
    """
    owner: Any = nn.init
    rejecting = owner._no_grad_trunc_normal_
    replaced = [(owner.orthogonal_, _orthogonal), (owner.sparse_, _sparse)]
    codes = [function.__code__ for function, _ in replaced]

    def inverted(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
        with torch.no_grad():
            tensor.uniform_(low, high, generator=generator)
            return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)

    with patching:
        owner._no_grad_trunc_normal_ = inverted
        for function, drawing in replaced:
            function.__code__ = drawing.__code__
        try:
            yield
        finally:
            owner._no_grad_trunc_normal_ = rejecting
            for (function, _), code in zip(replaced, codes, strict=True):
                function.__code__ = code


def _orthogonal(tensor: Tensor, gain: float = 1, generator: torch.Generator | None = None) -> Tensor:
    """Do as ``torch.nn.init.orthogonal_``. Only this function's code is used, with torch's own globals."""
    if tensor.ndimension() < 2:
        raise ValueError("Only tensors with 2 or more dimensions are supported")
    if tensor.numel() == 0:
        return tensor
    rows = tensor.size(0)
    flat = tensor.new_empty((rows, tensor.numel() // rows)).normal_(0, 1, generator=generator)
    if tensor.is_meta:
        return tensor
    wide = flat.size(1) > rows
    q, r = torch.linalg.qr(flat.t() if wide else flat)
    q = q * torch.diag(r, 0).sign()  # else not all orthogonal matrices are equally likely
    with torch.no_grad():
        return tensor.copy_((q.t() if wide else q).reshape(tensor.shape)).mul_(gain)


def _sparse(tensor: Tensor, sparsity: float, std: float = 0.01, generator: torch.Generator | None = None) -> Tensor:
    """Do as ``torch.nn.init.sparse_``; see ``_orthogonal``."""
    if tensor.ndimension() != 2:
        raise ValueError("Only tensors with 2 dimensions are supported")
    rows, columns = tensor.shape
    with torch.no_grad():
        tensor.normal_(0, std, generator=generator)
        for column in range(columns):
            zeros = torch.randperm(rows)[: math.ceil(sparsity * rows)]
            if not tensor.is_meta:
                tensor[zeros, column] = 0
    return tensor


class _KeyedDraws(TorchDispatchMode):
    """Seeds the generator with (seed, n) before the n-th random operation, whichever device its result is on."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.draws = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            # torch.manual_seed also formats its caller's stack, which took most of the time of building a stage.
            torch.default_generator.manual_seed(fold64(self.seed, self.draws) >> 1)
        return func(*args, **(kwargs or {}))
