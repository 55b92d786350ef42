"""Send the state of a stage replica to another process: parameters, optimizer state and running statistics.

Random numbers and samples need no transfer, since they follow from the seed and the number of the step
(``models.keyed_random``, ``data``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.errors import TransportError
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.master_weights import updated_tensor

OURS = "recovery"


def send_stage(group: dist.ProcessGroup, to: int, module: StageModule, optimizer: torch.optim.Optimizer) -> int:
    """Send a stage replica's state to rank ``to`` of ``group``; returns its bytes.

    Raises:
        TransportError: the receiver is gone, or does not take it in time.
    """
    names: list[list[str]] = []
    tensors: list[Tensor] = []
    for name, parameter, updated in _parameters(module, optimizer):
        tensors += [parameter.detach()] if updated is parameter else [parameter.detach(), updated.detach()]
        state = optimizer.state.get(updated, {})
        keys = sorted(key for key, value in state.items() if isinstance(value, Tensor))
        names.append([name, *keys])
        tensors += [state[key] for key in keys]
    tensors += _statistics(module)
    head: dict[str, Any] = {
        "names": names,
        "specs": [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors],
    }
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(text)]), to, group=group)
        dist.send(text, to, group=group)
        for tensor in tensors:
            dist.send(tensor.cpu().contiguous(), to, group=group)
    except RuntimeError as error:
        raise _lost(f"rank {to}", error) from error
    return sum(t.nbytes for t in tensors)


@torch.no_grad()
def receive_stage(group: dist.ProcessGroup, source: int, module: StageModule, optimizer: torch.optim.Optimizer) -> None:
    """Receive what ``send_stage`` sends from rank ``source`` of ``group`` into a stage replica of the same layers.

    Raises:
        TransportError: the sender is gone, or does not send in time, or has another stage.
    """
    try:
        count = torch.zeros(1, dtype=torch.int64)
        dist.recv(count, source, group=group)
        text = torch.empty(int(count), dtype=torch.uint8)
        dist.recv(text, source, group=group)
        head = json.loads(bytes(text.tolist()))
        arrived: list[Tensor] = []
        for shape, dtype in head["specs"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(tensor, source, group=group)
            arrived.append(tensor)
    except RuntimeError as error:
        raise _lost(f"rank {source}", error) from error
    left = iter(arrived)
    keys = {name: found for name, *found in head["names"]}
    own = list(_parameters(module, optimizer))
    if [name for name, _, _ in own] != list(keys):
        raise TransportError(OURS, f"rank {source} holds other parameters", "restart from the last checkpoint")
    for name, parameter, updated in own:
        parameter.copy_(next(left))
        if updated is not parameter:
            updated.copy_(next(left))
        if keys[name]:
            optimizer.state[updated] = {key: next(left).to(_where(key, updated)) for key in keys[name]}
    for held in _statistics(module):
        held.copy_(next(left))


def _where(key: str, updated: Tensor) -> torch.device:
    return updated.device


def _parameters(module: StageModule, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield each parameter with what the optimizer updates for it, in an order that the names give."""
    for name, parameter in sorted(module.named.items()):
        yield name, parameter, updated_tensor(optimizer, parameter)


def _statistics(module: StageModule) -> list[Tensor]:
    return [held for one in module.statistics for _, held in sorted(one.buffers_by_name.items())]


def _lost(who: str, error: RuntimeError) -> TransportError:
    return TransportError(OURS, f"lost {who} while state was moved: {error}", "restart from the last checkpoint")
