"""Start values of any module's parameters, drawn by key, for as few of them as a stage holds.

A module's constructor is the only one that knows how it starts. So it runs once more on each stage, with two changes:
the parameters of other stages go to the meta device the moment they are made, and the n-th random draw comes from a
generator of its own, seeded with (seed, n). The constructor makes the same draws in the same order wherever it runs -
on the meta device they cost nothing - so a parameter starts alike whoever holds it, whatever else is held.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.capture.meta import build_without_memory
from raypipe.models.keyed_random import fold64

_patching = threading.RLock()
"""Constructors register parameters in one place for the whole process."""


class StartValues(Protocol):
    """Where parameters get their first values."""

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """The values of all these parameters, and of those buffers that start otherwise than in the constructor."""


class Constructed:
    """What a constructor gives its parameters.

    ``build`` returns the module; it is called once without memory to learn the parameters' order, and once per stage.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build
        self._order: dict[str, int] | None = None

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """On the CPU, in the constructor's dtype; at most one other parameter is held at a time."""
        if self._order is None:
            with _registrations(None) as made:
                skeleton = build_without_memory(self.build)
            self._order = _order(skeleton, made)
        wanted = frozenset(self._order[name] for name in parameters)
        with _registrations(wanted), torch.random.fork_rng(devices=[]), _one_draw_each(), _KeyedDraws(seed):
            module = self.build()
        held = dict(module.named_parameters(remove_duplicate=False))
        return {name: held[name].detach() for name in parameters}


def _order(module: nn.Module, made: list[nn.Parameter]) -> dict[str, int]:
    """Per parameter name, the number of the registration that first made it; tied names share one."""
    first = {id(parameter): number for number, parameter in reversed(list(enumerate(made)))}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


@contextmanager
def _registrations(wanted: frozenset[int] | None) -> Iterator[list[nn.Parameter]]:
    """Collect each parameter as it is registered; all but the ``wanted`` numbers are moved to the meta device.

    None wants all; a parameter that is registered again (tied) stays what it is.
    """
    made: list[nn.Parameter] = []
    known: set[int] = set()
    register = nn.Module.register_parameter

    def noting(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or id(param) in known:
            register(module, name, param)
            return
        if wanted is not None and len(made) not in wanted:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(module, name, param)
        # A hook inside this one may have replaced it.
        made.append(module._parameters[name])  # type: ignore[arg-type]
        known.add(id(made[-1]))

    with _patching:
        nn.Module.register_parameter = noting  # type: ignore[method-assign,assignment]
        try:
            yield made
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _one_draw_each() -> Iterator[None]:
    """Make truncated normals of one draw, by the inverse of their distribution.

    torch draws again until all values are within the bounds: how often follows from the values, and on the meta device
    it draws nothing, so that every later parameter would start otherwise on another stage.
    """
    owner: Any = nn.init
    rejecting = owner._no_grad_trunc_normal_

    def inverted(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
        with torch.no_grad():
            tensor.uniform_(low, high, generator=generator)
            return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)

    with _patching:
        owner._no_grad_trunc_normal_ = inverted
        try:
            yield
        finally:
            owner._no_grad_trunc_normal_ = rejecting


class _KeyedDraws(TorchDispatchMode):
    """The n-th random operation draws from a generator seeded with (seed, n), wherever its result lives."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.draws = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.manual_seed(fold64(self.seed, self.draws) >> 1)
        return func(*args, **(kwargs or {}))
