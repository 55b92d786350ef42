"""float32 master weights: what the optimizer updates where a stage's parameters are bfloat16.

An update is often smaller than the last of a bfloat16's 8 bits and would be lost; in the master weight it adds up. The
optimizer's step reads each gradient in float32, updates the master weight, and rounds it to the parameter. Optimizer
state is float32 too. A parameter group of the optimizer has the parameters themselves under ``ROUNDED``.

Source: Micikevicius et al. 2018 (Mixed Precision Training, arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ROUNDED = "rounded"
"""Key of a parameter group: the parameters that are rounded from its ``params``, in the same order."""


def master_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace the 16-bit parameters of parameter groups by float32 copies, their master weights."""
    found = []
    for group in groups:
        rounded = list(group["params"])
        params = [nn.Parameter(p.detach().float()) if p.element_size() < 4 else p for p in rounded]
        found.append({**group, "params": params, ROUNDED: rounded})
    return found


def round_after_step(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of an optimizer over ``master_groups`` take the parameters' gradients and round to them."""
    optimizer.register_step_pre_hook(_take_gradients)
    optimizer.register_step_post_hook(_round)


def updated_tensor(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """Return what the optimizer updates for a parameter: its master weight, or the parameter itself."""
    return next((master for p, master in _pairs(optimizer) if p is parameter), parameter)


@torch.no_grad()
def load_master(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter, and its master weight if it has one."""
    parameter.copy_(value)
    master = updated_tensor(optimizer, parameter)
    if master is not parameter:
        master.copy_(value)


def _pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield each parameter that has a master weight, with it."""
    for group in optimizer.param_groups:
        for p, master in zip(group.get(ROUNDED, ()), group["params"], strict=False):  # no ROUNDED: no masters
            if p is not master:
                yield p, master


@torch.no_grad()
def round_all(optimizer: torch.optim.Optimizer) -> None:
    """Round every parameter from its master weight."""
    for p, master in _pairs(optimizer):
        p.copy_(master)


def _take_gradients(optimizer: torch.optim.Optimizer, *_hook: object) -> None:
    for p, master in _pairs(optimizer):
        master.grad = None if p.grad is None else p.grad.to(master.dtype)


@torch.no_grad()
def _round(optimizer: torch.optim.Optimizer, *_hook: object) -> None:
    graded = [(p, master) for p, master in _pairs(optimizer) if master.grad is not None]
    if not graded:
        return
    rounded, masters = map(list, zip(*graded, strict=True))
    torch._foreach_copy_(rounded, masters)
    for master in masters:
        master.grad = None
