"""Replace a device that died, on the devices: those that live leave the groups that they shared with it, finish or
forget their step, and send their state to the replacement.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from torch import Tensor, nn

from raypipe.errors import RaypipeError, TransportError
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.recovery.failure import Method, P, R, breaks_device, kind_of, raises_device_errors
from raypipe.runtime.setup.communicators import Communicators
from raypipe.runtime.setup.setup import rank_of
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.ledger import Facts, Standing
from raypipe.runtime.update.optimizer import updated_tensor
from raypipe.runtime.update.updates import Updates


def part(executor: Executor, communicators: Communicators) -> Standing:
    """Leave the channels and groups of a device for good, and say how far it is. Call it once.

    Its neighbours see that the connections end, so whoever waits for this device stops waiting, whatever for.
    Parameters, optimizer state and gradients stay. Groups whose collectives are still under way go in a thread: Gloo
    waits for these collectives, which end when the other members leave as well.
    """
    updates = executor.updates
    assert isinstance(updates, Updates)  # ``in_place.can_recover``
    leave(executor, communicators)
    return updates.standing()


def leave(executor: Executor, communicators: Communicators) -> None:
    """Leave the channels and groups of a device for good, also while a collective is under way.

    Each goes in a thread of its own: Gloo holds up whoever drops a group with a collective under way. That may end only
    when another member leaves, which waits for this device on another group.
    """
    held = [*communicators.leave(), *executor.leave()]
    while held:
        one = [held.pop()]
        threading.Thread(target=one.clear, name="raypipe-leave", daemon=True).start()


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of all calls that an error, or one that it comes from, has ended.

    They refer to channels and so to groups, whose connections would not end while anybody has the error: the call that
    fails, until it has ended, and a receiver, which keeps its failure and is then in a reference cycle that is never
    collected (``gc.freeze``). Tracebacks stay.
    """
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        errors += [e for e in (one.__cause__, one.__context__) if e is not None and id(e) not in seen]


def settle(executor: Executor, standing: Standing, target: int, facts: Facts | None) -> None:
    """Bring parameters and optimizer state to the end of ``target`` steps (``ledger.agreed_steps``).

    Args:
        executor: the device's, after ``part``.
        standing: what ``part`` returned.
        target: number of steps done.
        facts: of step ``target - 1``, as somebody has heard them; None if nobody has, and nobody needs them.
    """
    updates = executor.updates
    assert isinstance(updates, Updates)  # ``in_place.can_recover``
    if standing.done < target:
        assert facts is not None
        updates.finish_alone(facts.norm_squared)
    else:
        updates.finish_alone(None)
    executor.forget()


# Let a worker whose call fails for the loss of another device leave its groups at once, so that no other one waits.


def parts_when_lost(method: Method[P, R]) -> Method[P, R]:
    """Wrap a worker's method: where a connection is lost, the worker parts, and calls that are queued behind fail.

    So each failure shows at once where it was, and workers that live on can be set up again. Errors are raised as by
    ``raises_device_errors``.
    """

    @raises_device_errors
    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.apart:
            raise TransportError(
                self.whereabouts(), "does nothing until the lost device is replaced", "see the error that came before"
            )
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.broken = self.broken or breaks_device(error)
            goes_on = self.device.type == "cpu" or self.setup_data.job.train.elastic is not None
            if goes_on and not self.broken and kind_of(error) == "lost":
                _clear_frames(error)
                self.part()
            raise

    return run


# Send the state of a stage replica to another process: parameters, optimizer state and running statistics.
#
# Random numbers and samples need no transfer, since they follow from the seed and the number of the step
# (``models.keyed_random``, ``data``).

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
    head = {"names": names, "specs": [(t.shape, t.dtype) for t in tensors]}
    try:
        dist.send_object_list([head], to, group=group)
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
        headed: list[Any] = [None]
        dist.recv_object_list(headed, source, group=group)
        (head,) = headed
        arrived: list[Tensor] = []
        for shape, dtype in head["specs"]:
            tensor = torch.empty(shape, dtype=dtype)
            dist.recv(tensor, source, group=group)
            arrived.append(tensor)
    except RuntimeError as error:
        raise _lost(f"rank {source}", error) from error
    left = iter(arrived)
    keys = {name: result for name, *result in head["names"]}
    own = list(_parameters(module, optimizer))
    if [name for name, _, _ in own] != list(keys):
        raise TransportError(OURS, f"rank {source} holds other parameters", "restart from the last checkpoint")
    for name, parameter, updated in own:
        parameter.copy_(next(left))
        if updated is not parameter:
            updated.copy_(next(left))
        if keys[name]:
            optimizer.state[updated] = {key: next(left).to(updated.device) for key in keys[name]}
    for held in _statistics(module):
        held.copy_(next(left))


def _parameters(module: StageModule, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield each parameter with what the optimizer updates for it, in an order that the names give."""
    for name, parameter in sorted(module.named.items()):
        yield name, parameter, updated_tensor(optimizer, parameter)


def _statistics(module: StageModule) -> list[Tensor]:
    return [held for one in module.statistics for _, held in sorted(one.buffers_by_name.items())]


def _lost(who: str, error: RuntimeError) -> TransportError:
    return TransportError(OURS, f"lost {who} while state was moved: {error}", "restart from the last checkpoint")


# Which living device can give a replacement the state of each stage that it has to hold.


class Transfer(NamedTuple):
    """The state of a stage replica goes from one process to another."""

    source: tuple[int, int]
    """(stage, replica) as the sender has it."""
    target: tuple[int, int]
    """(stage, replica) as the receiver has it."""
    sender: int
    """Rank of the process that has the state."""
    receiver: int
    """Rank of the replacement."""


def transfers(
    placement: Sequence[Sequence[int]], dead: Collection[int], tensor: int = 1, shares: Sequence[int] | None = None
) -> list[Transfer] | None:
    """Return the transfers that restore the processes ``dead``, in one order for all; None if a stage is lost.

    Args:
        placement: device of each stage, per replica.
        dead: ranks.
        tensor: number of processes of a device; each has a twin of its own tensor rank only.
        shares: which share of the experts each replica holds (``expert_ranks``); twins have the same. None: all of it.

    >>> transfers([[0, 1], [2, 3]], {1})
    [Transfer(source=(1, 1), target=(1, 0), sender=3, receiver=1)]
    >>> transfers([[0, 1]], {1}) is None
    True
    >>> transfers([[0], [1]], {1}, shares=[0, 1]) is None  # the only holder of its experts
    True
    """
    of = [0] * len(placement) if shares is None else shares
    result = []
    for rank in sorted(dead):
        device, tensor_rank = divmod(rank, tensor)
        for replica, devices in enumerate(placement):
            for stage, held in enumerate(devices):
                if held != device:
                    continue
                twins = (
                    (rank_of(other[stage], tensor_rank, tensor), r)
                    for r, other in enumerate(placement)
                    if of[r] == of[replica]
                )
                living = [(twin, r) for twin, r in twins if twin not in dead]
                if not living:
                    return None
                sender, r = living[0]
                result.append(Transfer((stage, r), (stage, replica), sender, rank))
    return result


def outcomes(refs: Sequence[Any]) -> list[Any | None]:
    """Return the results of calls that have ended, None for those that failed."""
    result: list[Any | None] = []
    for ref in refs:
        try:
            result.append(ray.get(ref))
        except (RayError, RaypipeError):
            result.append(None)
    return result


def completed(results: Sequence[StepResult | None], facts: Facts) -> list[StepResult]:
    """Put what every device has told the others of a step in the place of results that were lost."""
    told = zip(facts.loss_sum, facts.samples, facts.norm_squared, strict=True)
    return [
        one
        if one is not None
        else StepResult(loss, samples, norm, np.zeros((0, 2)), 0, 0, 0.0, 0, StepMemory(0, {}), False)
        for one, (loss, samples, norm) in zip(results, told, strict=True)
    ]
