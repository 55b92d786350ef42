"""Running statistics of batch norm that do not depend on the plan.

A training forward normalises with the statistics of its micro-batch and does not read the running ones. So the
statistics of each micro-batch can be recorded, and the running statistics be updated once per step, as a single process
would that runs all micro-batches of the mini-batch in ascending order (gradient accumulation in plain PyTorch):

    running <- (1 - m)^N running + sum over k = 0..N-1 of m (1 - m)^(N-1-k) seen_k

``m`` is the momentum, ``N`` the number of micro-batches. Each replica of a stage computes its part of the sum, and the
parts are all-reduced with the gradients, so that all replicas hold the same statistics. A forward that runs again (for
recomputation, or because an update was undone) records the same micro-batch again, which changes nothing.

Source: Ioffe and Szegedy 2015, section 3.1, with ``torch.nn.BatchNorm``'s conventions (unbiased variance).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from raypipe.capture.opaque import TARGET as OPAQUE
from raypipe.capture.opaque import learns
from raypipe.errors import CaptureError, RunError
from raypipe.graph.operations import Operation, OperationGraph
from raypipe.models.keyed_random import current_keys, in_training

BATCH_NORM = "aten.batch_norm.default"
COUNTER = "num_batches_tracked"
BUFFERS = ("running_mean", "running_var")


class _Seen(NamedTuple):
    """The statistics of one micro-batch."""

    number: int
    """Number of the micro-batch within its step."""
    moments: Tensor
    """``[2, channels]``: means, unbiased variances."""


class RunningStatistics(nn.Module):
    """One batch norm of a captured graph, which replaces the batch norm operation.

    ``name`` is the path of the norm in the model; ``mean``, ``variance`` and ``count`` are its buffers, which only
    ``move`` and ``move_on`` change.
    """

    def __init__(self, name: str, mean: Tensor, variance: Tensor, count: Tensor | None, momentum: float) -> None:
        super().__init__()
        self.name, self.momentum = name, momentum
        # In a tuple, so that they are not registered as buffers: the graph already has them under their own names.
        self._held: tuple[Tensor, Tensor, Tensor | None] = (mean, variance, count)
        self._seen: dict[tuple[int, int], _Seen] = {}

    @property
    def buffers_by_name(self) -> dict[str, Tensor]:
        """The running statistics by their names in the model."""
        names = (*BUFFERS, COUNTER)
        return {f"{self.name}.{n}": t for n, t in zip(names, self._held, strict=True) if t is not None}

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self._held[0].numel()

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        training: bool,
        momentum: float,
        eps: float,
        cudnn: bool,
    ) -> Tensor:
        """Normalise ``x`` ``[samples, channels, ...]``: by its own statistics in training, else by the running ones.

        Raises:
            RunError: the micro-batch has a single value per channel, so there is no variance.
        """
        if not in_training():
            return torch.batch_norm(x, weight, bias, mean, variance, False, momentum, eps, cudnn)
        if x.numel() == x.shape[1]:
            why = "batch norm has only one value per channel in a micro-batch, so there is no variance"
            raise RunError(self.name, why, "use parallel.microbatch of 2 or more")
        # With momentum 1 the kernel stores exactly this micro-batch's statistics in `own`, on any device.
        own = torch.zeros(2, self.channels, dtype=mean.dtype, device=mean.device)
        normalised = torch.batch_norm(x, weight, bias, own[0], own[1], True, 1.0, eps, cudnn)
        self.note(own)
        return normalised

    def note(self, moments: Tensor) -> None:
        """Note the statistics of the micro-batch whose random keys are set, ``[2, channels]``."""
        keys = current_keys()
        if keys is not None:
            self._seen[keys.step, keys.first] = _Seen(keys.first // len(keys.samples), moments)

    def take(self, step: int, first: int) -> Tensor | None:
        """Forget the statistics of one micro-batch and return them; None if it has left none."""
        seen = self._seen.pop((step, first), None)
        return None if seen is None else seen.moments

    def part(self, step: int, count: int) -> Tensor:
        """Return this replica's part of the sum for a step of ``count`` micro-batches, ``[2 * channels]``."""
        total = torch.zeros(2, self.channels, dtype=self._held[0].dtype, device=self._held[0].device)
        for (of, _), seen in sorted(self._seen.items()):
            if of == step:
                total += self.momentum * (1 - self.momentum) ** (count - 1 - seen.number) * seen.moments
        return total.flatten()

    def move(self, total: Tensor, step: int, count: int) -> None:
        """Update the running statistics by the sum of a step over all replicas."""
        mean, variance, counter = self._held
        for held, change in zip((mean, variance), total.view(2, -1), strict=True):
            held.mul_((1 - self.momentum) ** count).add_(change)
        if counter is not None:
            counter.add_(count)
        self.forget(step)

    def forget(self, step: int) -> None:
        """Drop what was seen in the steps up to this one."""
        self._seen = {at: seen for at, seen in self._seen.items() if at[0] > step}

    def move_on(self) -> None:
        """Update them by the micro-batches since the last update, for schedules that update after each micro-batch."""
        mean, variance, counter = self._held
        for _, seen in sorted(self._seen.items()):
            mean.lerp_(seen.moments[0], self.momentum)
            variance.lerp_(seen.moments[1], self.momentum)
            if counter is not None:
                counter.add_(1)
        self._seen.clear()


def part_of_step(statistics: Sequence[RunningStatistics], step: int, count: int) -> Tensor:
    """Concatenate the parts of several norms to one flat tensor."""
    return torch.cat([one.part(step, count) for one in statistics])


def move_all(statistics: Sequence[RunningStatistics], total: Tensor, step: int, count: int) -> None:
    """Update several norms by the sum of ``part_of_step`` over all replicas."""
    begin = 0
    for one in statistics:
        end = begin + 2 * one.channels
        one.move(total[begin:end], step, count)
        begin = end


def check_buffers(graph: OperationGraph) -> None:
    """Reject models that write buffers in other ways than batch norm does, or have batch norms in opaque modules.

    Raises:
        CaptureError: there is such a buffer; the error names module and line.
    """
    users: dict[str, list[int]] = {}
    for number, operation in enumerate(graph.operations):
        for name in operation.sources:
            users.setdefault(name, []).append(number)
    norms = {o.mutates[0].rpartition(".")[0] for o in graph.operations if o.target == BATCH_NORM and o.mutates}
    for operation in graph.operations:
        if operation.target == OPAQUE and learns(operation):
            why = "cannot be captured, and holds a batch norm with running statistics"
            fix = (
                "call each batch norm once in a forward and give it a momentum that is a number, or set "
                "model.batch_norm: frozen"
            )
            raise CaptureError(f"module {operation.args[0]}", why, fix)
        for name in operation.mutates:
            owner, _, leaf = name.rpartition(".")
            if owner in norms and leaf == COUNTER:
                continue
            where = f"{operation.module or operation.name}{operation.source and ', ' + operation.source}"
            if operation.target != BATCH_NORM:
                why = f"{operation.target} writes {name} in every forward, so results would depend on the plan"
                fix = "keep it out of the forward, or use a norm without running statistics (GroupNorm, LayerNorm)"
                raise CaptureError(where, why, fix)
            if len(users[name]) > 1:
                why = f"{name} is also read elsewhere in the forward, where it would be out of date"
                fix = "read running statistics only in their batch norm, or set model.batch_norm: frozen"
                raise CaptureError(where, why, fix)


def uses_batch_statistics(operation: Operation) -> bool:
    """Return whether an operation's result for a sample depends on the other samples of its micro-batch."""
    return operation.target == BATCH_NORM and bool(operation.args[5])


def learn_statistics(module: fx.GraphModule, start: Mapping[str, Tensor]) -> tuple[RunningStatistics, ...]:
    """Replace each batch norm with running statistics in a graph by a ``RunningStatistics``, in place.

    ``start`` are the model's buffers as constructed. The operations that count batches are removed, because
    ``RunningStatistics.move`` counts them.
    """
    result: list[RunningStatistics] = []
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and str(node.target).rpartition(".")[2] == COUNTER:
            for user in reversed(_users(node)):
                module.graph.erase_node(user)
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.aten.batch_norm.default or not node.args[5] or node.args[3] is None:
            continue
        owner = str(node.args[3].target).rpartition(".")[0]
        mean, variance = (module.get_buffer(str(arg.target)) for arg in node.args[3:5])
        counter = f"{owner}.{COUNTER}"
        count = start[counter].to(mean.device, copy=True) if counter in start else None
        one = RunningStatistics(owner, mean, variance, count, float(node.args[6]))
        path = f"_statistics_{len(result)}"
        module.add_submodule(path, one)
        result.append(one)
        node.op, node.target = "call_module", path
    module.recompile()
    return tuple(result)


def _users(node: fx.Node) -> list[fx.Node]:
    """Return all nodes that depend on a node, in the graph's order."""
    result: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.op != "output":
                result[user] = None
                todo.append(user)
    return [n for n in node.graph.nodes if n in result]
