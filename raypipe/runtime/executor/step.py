"""The settings of a step beyond its program, the result that each device reports, and checks over all results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.checkpoint import ShardInfo
from raypipe.errors import SampleCountError
from raypipe.plan.online.controller import StepMemory
from raypipe.plan.online.recorded_steps import StepWaits
from raypipe.runtime.executor.casts import MessageCast
from raypipe.runtime.executor.metrics import MicrobatchPredictions
from raypipe.runtime.hosts.node_files import SentShard
from raypipe.runtime.process.clock import Spans
from raypipe.runtime.process.memory import MeasuredMemory
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy

CompileState = Literal["settled", "compiling", "ready"]
"""How far a device is: it has nothing to swap; its programs are not there yet; they are, and wait for the driver."""


@dataclass(frozen=True)
class CutReport:
    """The consequences of the cut of a stage for memory and for what W can put off, and what is left eager."""

    in_input_grad: tuple[str, ...]
    """Matrices whose gradients are computed in B."""
    kept_bytes: int
    handed_bytes: int
    eager_validation: str | None = None
    """Why the stage runs eagerly in validations, where it was to be compiled for them."""


@dataclass(frozen=True)
class StageReport:
    """The outcome for one stage replica."""

    stage: int
    replica: int
    seconds: float
    """What tracing and compiling took."""
    reason: str | None = None
    """Why it runs eagerly; None if it is compiled."""
    in_input_grad: tuple[str, ...] = ()
    """Matrices whose gradients are computed in B, in a schedule that splits the backward."""
    kept_bytes: int = 0
    """Bytes that a micro-batch of the longest samples keeps from its forward to its backward, without parameters and
    inputs."""
    handed_bytes: int = 0
    """Bytes that it keeps from B to W, alike."""
    lengths: int = 1
    """For how many lengths of samples it is compiled."""
    eager_share: float = 0.0
    """Share of the micro-batches looked at that run eagerly, since they are padded to another length."""
    validation_lengths: int = 0
    """For how many lengths of samples it is compiled for validations; where it is for none, these run eagerly."""
    eager_validation: str | None = None
    """Why so, where it was to be compiled for them."""

    @classmethod
    def of(
        cls, key: tuple[int, int], seconds: float, kept: CutReport, lengths: int, eager_share: float, validation: int
    ) -> StageReport:
        """Return the report of a stage replica that is compiled; ``validation``: lengths wanted for validations."""
        why, sizes = kept.eager_validation, (kept.kept_bytes, kept.handed_bytes)
        result = (validation if why is None else 0), why
        return cls(*key, seconds, None, kept.in_input_grad, *sizes, lengths, eager_share, *result)


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


MOST_STEPS = 8
"""Steps in one call of the workers. More would gain next to nothing: their share of a call is an eighth already."""


class FirstK(NamedTuple):
    """How many layers' weight gradients a stage postpones (reverse first-k)."""

    stage: int
    k: int
    most: int
    """The largest k that memory allows."""
    peaks: tuple[float, ...]
    """By k, the bytes that a holder has allocated at its fullest in the backward; empty where they are not known."""


@dataclass(frozen=True, slots=True)
class Written:
    """The shard that a worker has written for a save."""

    rank: int
    number: int
    """Of the save."""
    shard: ShardInfo | SentShard | None
    """None if the worker had nothing to write."""
    seconds: float
    lost: bool = False
    """Whether a keeper of a copy is gone, and where ``shard`` is None all of them (``neighbour_copies``)."""
    processor_s: float = 0.0
    """Processor time that sending a copy took, here and at its keepers."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's report of one step. But for predictions it stays small, because it travels through Ray."""

    loss_sum: float
    """Sum of the losses of the micro-batches whose last stage is on this device, divided by the targets of the
    mini-batch; 0 on all but the first tensor-parallel rank of a device."""
    samples: int
    """Samples in ``loss_sum``."""
    norm_squared: float
    """This device's share of the squared global gradient norm, before clipping."""
    times: NDArray[np.float64]
    """``[tasks, 2]``: start and end of every task, in seconds on the run's clock (``shared_clock``). Until the worker
    converts them, on this host's monotonic clock."""
    received: int
    """Number of messages received from other devices."""
    received_bytes: int
    """Bytes of the tensors in those messages."""
    all_reduces: float
    """Gradient all-reduces; every rank of a group counts 1 / (size of the group) for each."""
    tensor_all_reduces: int
    """All-reduces within layers, over the tensor-parallel ranks of this device."""
    memory: StepMemory
    """Measured memory; zeros where it was not measured."""
    optimistic: bool
    """Whether the update was made before the global norm was known; a norm above the limit undoes and repeats it."""
    expert_all_to_alls: float = 0.0
    """All-to-alls of tokens between the copies that divide experts; every copy counts its share of one."""
    all_gathers: float = 0.0
    """Gathers of a stage's weights; every member of a group counts 1 / (size of the group) for each."""
    reduce_scatters: float = 0.0
    """Reduce-scatters of a stage's gradients, counted alike."""
    device_memory: MeasuredMemory | None = None
    """Memory of the device's process, about once a second; None in between."""
    first_k: tuple[FirstK, ...] = ()
    """With reverse first-k: of each stage, once and whenever it has changed."""
    data_wait_s: float = 0.0
    """Seconds for which this device waited for its samples."""
    gather_waits: tuple[tuple[int, float], ...] = ()
    """(position of a task in this device's order, seconds in it that it waited for gathered weights); on CPUs."""
    message_waits: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Position of a task in this device's order -> seconds before it that this device waited for messages, and seconds
    from then to its start; on CPUs."""
    sums_wait_s: float = 0.0
    """Seconds before the first update that this device waited for gradient sums; on CPUs."""
    written: Written | None = None
    """The write of a checkpoint that has ended since the step before, if one has."""
    compiled: tuple[StageReport, ...] = ()
    """Stages that were compiled beside the steps before, or are not run compiled any more."""
    compile_state: CompileState = "settled"
    """How far this device's compiled programs are."""
    notices: tuple[str, ...] = ()
    """Tasks that could not be captured as graphs since the step before, each with the reason."""
    leaves: bool = False
    """Whether this process was told to end, by a SIGTERM."""
    figures: tuple[tuple[str, float], ...] = ()
    """In a validation: (name, sum) of each figure of the loss function, divided as ``loss_sum`` is; on the devices that
    have a share of it."""
    predictions: tuple[MicrobatchPredictions, ...] = ()
    """In a validation with metrics: what the last stage put out; on the first tensor-parallel rank of a device."""
    expert_loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By path of a module of divided experts, how many of this device's tokens went to each expert, of all copies'."""


def check_samples(where: str, results: Sequence[StepResult], due: int) -> None:
    """Check that the loss covers exactly ``due`` samples; training on a part of them would otherwise go unnoticed.

    Raises:
        SampleCountError: there are more or fewer than ``due``.
    """
    counted = sum(r.samples for r in results)
    if counted != due:
        raise SampleCountError(
            where,
            f"its loss covers {counted} samples instead of {due}",
            "this is a fault of raypipe: report it with the run's plan.json",
        )


def expert_loads(devices: Sequence[StepResult]) -> dict[str, NDArray[np.int64]]:
    """Return the tokens of each expert, over all copies, by module of divided experts in the model's order."""
    total: dict[str, NDArray[np.int64]] = {}
    for one in devices:
        for path, counts in one.expert_loads.items():
            total[path] = total.get(path, 0) + np.asarray(counts)

    def place(path: str) -> list[tuple[int, str]]:
        return [(int(name) if name.isdigit() else 0, name) for name in path.split(".")]

    return {path: total[path] for path in sorted(total, key=place)}


def waits_of(devices: Sequence[StepResult]) -> StepWaits:
    """Return what devices waited for inside the tasks of a step."""
    messages = tuple(r.message_waits for r in devices)
    return StepWaits(
        data_s=tuple(r.data_wait_s for r in devices),
        gather_s=tuple(dict(r.gather_waits) for r in devices),
        sums_s=tuple(r.sums_wait_s for r in devices),
        message_s=messages if any(messages) else (),
    )


def communication_counts(results: Sequence[StepResult], tensor: int) -> dict[str, int]:
    """Sum the messages, their bytes and the all-reduces of a step over all workers.

    ``tensor`` is the number of workers per device.
    """
    counts = {
        "p2p": sum(r.received for r in results),
        "p2p_bytes": sum(r.received_bytes for r in results),
        "all_reduce": round(math.fsum(r.all_reduces for r in results)),
        "all_gather": round(math.fsum(r.all_gathers for r in results)),
        "reduce_scatter": round(math.fsum(r.reduce_scatters for r in results)),
    }
    if tensor > 1:
        counts["tensor_all_reduce"] = sum(r.tensor_all_reduces for r in results) // tensor
    if exchanged := round(math.fsum(r.expert_all_to_alls for r in results)):
        counts["expert_all_to_all"] = exchanged
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings that stay the same over all steps of a run."""

    seed: int
    microbatches: int
    """Micro-batch ids of a step, over all replicas."""
    samples_per_microbatch: int
    slices: int = 1
    """Slices of a micro-batch along the sequence, each an id of its own."""
    clip: float | None
    skips: bool = False
    """Whether a step whose loss or gradients are not finite makes no update."""
    update: RequestedNormPolicy
    timeout_s: float
    autocast: torch.dtype | None
    device: torch.device
    message_cast: MessageCast | None = None
    """Cast of the messages between devices; None to send them as they are."""
    by_layer: bool = False
    """Whether layers are updated one by one as their sums come in (``update.late_updates``)."""
    side_stream: Mapping[int, int] | None = None
    """Where weight gradients and updates run on a second stream (``update.late_updates``): the stages whose last weight
    gradient is held back, and before which stage's next forward it begins."""
    sub_pipelined: bool = False
    """Whether every micro-batch runs in two halves that alternate."""
    pairs: bool = False
    """Whether the halves of a pair run in turns, on CPUs: while one's tokens travel to experts, the other computes."""
    tensor_rank: int = 0
    """Tensor rank of this process within its device. All ranks compute the loss; only rank 0 reports it."""


# A step that was started, and whose result the host reads later: on a GPU, while the next step runs.


@dataclass(frozen=True, slots=True)
class StartedStep:
    """All that is known of a step when its last task has been queued."""

    partial: StepResult
    """The result, as far as the host knows it."""
    loss: Tensor | None
    """Sum of the losses, on its way to the host (``host_copies.to_host``); None without a last stage here."""
    targets: int
    """Targets of the mini-batch."""
    spans: Spans
    times_of: Callable[[Spans], NDArray[np.float64]]
    """Waits for the step's end."""
    loads: Mapping[str, Tensor]
    """``StepResult.expert_loads``, on its way to the host."""
    norm_squared: Callable[[NDArray[np.float64]], float] | None = None
    """Completes the updates (``update.policy.Report``); None in a validation."""

    def result(self) -> StepResult:
        """Wait for the end of the step on the device, and return its result. Call it once, in the order of steps.

        Raises:
            TransportError: the device, or one of its messages, does not get there in time.
        """
        times = self.times_of(self.spans)
        loss = 0.0 if self.loss is None else float(self.loss) / self.targets
        norm = 0.0 if self.norm_squared is None else self.norm_squared(times)
        loads = {path: counts.tolist() for path, counts in self.loads.items()}
        return replace(self.partial, times=times, loss_sum=loss, norm_squared=norm, expert_loads=loads)
