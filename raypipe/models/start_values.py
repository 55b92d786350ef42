"""Start values of a module's parameters, drawn by key, for only those parameters that a stage holds.

Only a module's constructor knows its start values, so it runs once more on each stage, with two changes. Parameters of
other stages go to the meta device as soon as they are made. And the n-th random draw uses a generator seeded with
(seed, n). The constructor makes the same draws in the same order on every stage (draws on the meta device cost
nothing), so a parameter's start values do not depend on the stage that holds it.
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
"""Guards the patches of ``torch.nn``, which affect the whole process."""


class StartValues(Protocol):
    """A source of start values."""

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return values of all these parameters, and of those buffers whose value differs from the constructor's."""


class Constructed:
    """The start values that a module's constructor draws.

    ``build`` returns the module; it is called once without memory to learn the parameters' order, and once per stage.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build
        self._order: dict[str, int] | None = None

    def read(self, parameters: Collection[str], buffers: Collection[str], seed: int) -> Mapping[str, Tensor]:
        """Return the values on the CPU in the constructor's dtype; at most one other parameter is allocated."""
        if self._order is None:
            with _registrations(None) as made:
                skeleton = build_without_memory(self.build)
            self._order = _order(skeleton, made)
        wanted = frozenset(self._order[name] for name in parameters)
        with _registrations(wanted), torch.random.fork_rng(devices=[]), _one_draw_each(), _KeyedDraws(seed):
            module = self.build()
        made_parameters = dict(module.named_parameters(remove_duplicate=False))
        return {name: made_parameters[name].detach() for name in parameters}


def _order(module: nn.Module, made: list[nn.Parameter]) -> dict[str, int]:
    """Return, per parameter name, the number of the registration that first made it; tied names share one."""
    first = {id(parameter): number for number, parameter in reversed(list(enumerate(made)))}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


@contextmanager
def _registrations(wanted: frozenset[int] | None) -> Iterator[list[nn.Parameter]]:
    """Collect each parameter as it is registered, and move all but the ``wanted`` numbers to the meta device.

    None moves none. A parameter that is registered again, because it is tied, is left as it is.
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
        # A patch of register_parameter below this one may have replaced it.
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
    """Make ``trunc_normal_`` use exactly one draw, by inverting the distribution.

    torch redraws until all values are within the bounds. The number of draws would then depend on the values, which
    the meta device does not have, and so the start values of later parameters would depend on the stage.
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
    """Seeds the generator with (seed, n) before the n-th random operation, whichever device its result is on."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.draws = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            torch.manual_seed(fold64(self.seed, self.draws) >> 1)
        return func(*args, **(kwargs or {}))
