"""The profile: the costs of each layer of a model on one device, and of the links between devices.

Costs always reach the planner in this form, whether measured (``raypipe profile``) or computed from a description of
the machine. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.cost.hosts import Hosts
from raypipe.cost.layer_work import ExpertsWork, LinearHead
from raypipe.job.field_types import Devices, Positive, ReduceDtype, Spec
from raypipe.job.reading import load_json
from raypipe.job.spec import JobSpec

Seconds = Annotated[float, Field(ge=0, le=1e9)]
"""Times, bytes and counts are bounded so that sums of many do not overflow; 1e9 s are thirty years."""
Bytes = Annotated[float, Field(ge=0, le=1e21)]
Count = Annotated[int, Field(ge=0, le=10**18)]
LIMIT = 0.1
"""Disturbances above this share cause a warning, because plans differ by less."""


class Noise(Spec):
    """How wrong the times of a profile may be. On a quiet machine each figure is a few hundredths."""

    stolen: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the measured tasks' time in which other processes had the cores, so that the tasks' threads did not
    run. It is the largest over micro-batch sizes and devices, and 0 on GPUs."""
    drift: Annotated[float, Field(ge=0)] = 0.0
    """Relative difference between the times of the same tasks at the end of the measurement and before."""
    again: Annotated[int, Field(ge=0)] = 0
    """Number of micro-batch sizes that were measured again because of noise."""

    @property
    def worst(self) -> float:
        """The larger of the two shares."""
        return max(self.stolen, self.drift)

    def warning(self) -> str | None:
        """Return a warning to print, or None if the noise is within ``LIMIT``.

        >>> print(Noise(stolen=0.46, drift=0.02).warning())
        warning: the measured times may be wrong: other processes had the cores for 46% of the time; measure again on \
a quiet machine
        """
        if self.worst <= LIMIT:
            return None
        return f"warning: the measured times may be wrong: {self.cause()}; measure again on a quiet machine"

    def cause(self) -> str:
        """Return the larger disturbance as a sentence.

        >>> Noise(stolen=0.1, drift=0.2).cause()
        'the same tasks took 20% more or less time at the end'
        """
        if self.stolen >= self.drift:
            return f"other processes had the cores for {self.stolen:.0%} of the time"
        return f"the same tasks took {self.drift:.0%} more or less time at the end"

    def sentence(self) -> str:
        """Return all figures as a sentence, for the notes of a table."""
        return (
            f"other processes had the cores for {self.stolen:.1%} of the time, the same tasks took {self.drift:.1%} "
            f"more or less at the end; {self.again} sizes measured again"
        )


class TaskTimes(Spec):
    """Seconds of each task of one layer for one micro-batch."""

    forward: Seconds
    input_grad: Seconds
    """B, where the backward is split."""
    weight_grad: Seconds
    """W, where the backward is split."""
    joint: Seconds
    """BW: both gradients in one pass, which may take less than B plus W."""
    recompute: Seconds
    """R: a second forward, this time with the autograd graph."""
    spread: Annotated[float, Field(ge=0)] = 0.0
    """Half the interquartile range of the forward's measured times, over their median; 0 if computed."""

    def scaled(self, factor: float) -> TaskTimes:
        """Return the times on a device that takes ``factor`` times as long."""
        tasks = ("forward", "input_grad", "weight_grad", "joint", "recompute")
        return self.model_copy(update={task: factor * getattr(self, task) for task in tasks})


class ExpertsProfile(Spec):
    """The part of a measured layer's costs that its experts have, to divide them (``cost/experts.py``)."""

    work: ExpertsWork
    forward: Annotated[float, Field(ge=0, le=1)]
    """Share of the forward's operations that are the experts', and so grow with the rows that they get."""
    input_grad: Annotated[float, Field(ge=0, le=1)]
    """The same of B."""
    weight_grad: Annotated[float, Field(ge=0, le=1)]
    """The same of W."""
    loads: Annotated[tuple[Bytes, ...], Field(strict=False)] = ()
    """Rows of each expert over the mean, as the router chose them for the job's own samples; none: not measured."""

    def imbalance(self, group: int, order: Sequence[int] | None = None) -> float:
        """Return the rows of the busiest of ``group`` copies that divide the experts, over the mean.

        ``order``: see ``busiest``; None: the most even one.
        """
        return busiest(self.loads, even_order(self.loads, group) if order is None else order, group)


def busiest(loads: Sequence[float], order: Sequence[int], group: int) -> float:
    """Return the load of the busiest of ``group`` copies that hold experts in an order, over the mean; 1 without loads.

    >>> busiest((3, 1, 1, 3, 0, 0), (), 3), busiest((3, 1, 1, 3, 0, 0), (0, 4, 3, 5, 1, 2), 3)
    (1.5, 1.125)
    """
    held, mean = len(loads) // group, sum(loads) / group
    placed = [loads[k] for k in order or range(len(loads))]
    return max(sum(placed[i : i + held]) for i in range(0, len(placed), held)) / mean if mean else 1.0


def even_order(loads: Sequence[float], group: int) -> tuple[int, ...]:
    """Return experts in an order in which ``group`` copies that hold equally many have loads as even as can be had so:
    the largest first, each to the copy with the least load that has room. Nothing where that is not more even.

    >>> even_order((3, 1, 1, 3, 0, 0), 3), even_order((1, 1, 1, 1), 2)
    ((0, 4, 3, 5, 1, 2), ())
    """
    held = len(loads) // group
    copies: list[list[int]] = [[] for _ in range(group)]
    for expert in sorted(range(len(loads)), key=lambda k: (-loads[k], k)):
        room = [own for own in copies if len(own) < held]
        min(room, key=lambda own: sum(loads[k] for k in own)).append(expert)
    order = tuple(k for own in copies for k in own)
    return order if busiest(loads, order, group) < busiest(loads, (), group) else ()


class LayerProfile(Spec):
    """The costs of one layer: the smallest unit that a cut of the model can assign to a stage."""

    name: str
    parameters: Count
    """Number of parameter values; a tied matrix counts in each layer that holds it."""
    trained_parameters: Count | None = None
    """Those of ``parameters`` that are trained; the rest are frozen. None: all are."""
    times: dict[Positive, TaskTimes]
    """Micro-batch size in samples -> task times."""
    kept_bytes: Bytes
    """Activations of one sample kept from the forward to the end of the backward, the layer's input included unless it
    is in ``unread_input_bytes``."""
    unread_input_bytes: Bytes = 0.0
    """The part of one sample's input that no backward reads: only a stage that begins with the layer holds it."""
    kept_fixed_bytes: Bytes = 0.0
    """Bytes that each micro-batch keeps whatever its size, until a joint backward."""
    cast_bytes: Bytes = 0.0
    """Autocast's 16-bit copies of the weights, which all micro-batches of a step share."""
    waiting_bytes: Bytes | None = None
    """With a split backward, what one sample keeps from B to W: inputs of products and the gradients of their outputs.
    None: as much as from F to B."""
    read_bytes: Bytes = 0.0
    """Input arrays of one sample that the layer reads from the data, besides the output of the layer before."""
    output_bytes: Bytes
    """Tensors of one sample that cross a cut right after this layer; 0 for the last layer."""
    input_bytes: Bytes | None = None
    """What one sample brings to this layer, where that is not the output of the layer before; None: it is."""
    output_floats: Bytes | None = None
    """The part of ``output_bytes`` that is floating-point values of the weights' width; None: all of it."""
    message_bytes: Bytes | None = None
    """Bytes of one sample in a message after this layer, if not ``output_bytes``; see ``with_cast_messages``."""
    workspace_bytes: Bytes = 0.0
    """Peak temporary memory of the joint backward for one sample, besides what is kept."""
    workspace_fixed_bytes: Bytes = 0.0
    """The part that does not depend on the micro-batch size: a matrix's gradient before it is accumulated."""
    split_workspace_bytes: Bytes | None = None
    """``workspace_bytes`` of B with a split backward; None: the same as for the joint backward."""
    operand_bytes: Bytes | None = None
    """The part of both that one sample's compiled backward has at its end, for its weight gradients; None: eager."""
    chunk_bytes: Bytes = 0.0
    """Temporary memory of the chunk of tokens whose loss is computed at once. W needs it, if the backward is split."""
    matrices: tuple[tuple[Count, Count], ...] = ()
    """Rows and columns of each matrix that updates iterate on (Muon's): copies may only divide them whole."""
    attention_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the forward's time that is causal attention, and so grows along the slices of a sequence."""
    attention_grad_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The same of ``input_grad``."""
    expert_parameters: Count = 0
    """Trained ones that belong to experts: where copies divide these, fewer devices hold the same ones."""
    exchanged_bytes: Bytes = 0.0
    """Bytes of one sample's tokens on their way to the devices that hold their experts, those that stay included, times
    how much more than the mean the busiest device gets. As many come back. Where copies divide sequences, the keys and
    values of all positions instead."""
    experts: ExpertsProfile | None = None
    """The layer's experts, where it was measured with all of them; None: it has none, or it was computed."""
    key_value_bytes: Bytes = 0.0
    """Keys and values of one sample. Where micro-batches run in slices, gradients as large wait for earlier slices."""

    @model_validator(mode="after")
    def _trained_are_some(self) -> LayerProfile:
        if self.trained > self.parameters:
            raise ValueError(f"layer {self.name} trains more parameters than it has")
        return self

    @property
    def trained(self) -> int:
        """Number of parameter values that have a gradient and optimizer state."""
        return self.parameters if self.trained_parameters is None else self.trained_parameters

    @property
    def waiting(self) -> float:
        """Bytes that one sample keeps from B to W."""
        return self.kept_bytes if self.waiting_bytes is None else self.waiting_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes of one sample in a message after this layer."""
        return self.output_bytes if self.message_bytes is None else self.message_bytes


class Slicing(Spec):
    """How samples can be cut along the sequence (``parallel.slices``)."""

    positions: Count
    """Positions of a sample."""
    shortest: Count = 1
    """Positions of the shortest slice that the model's code allows."""
    refused: str = ""
    """Why the model cannot run in slices, as a clause; empty if it can."""
    packed: bool = False
    """Rows hold several documents: copies can divide them (``parallel.context``), slices cannot."""

    @property
    def refused_slices(self) -> str:
        """Why micro-batches run whole (``parallel.slices: 1``), as a clause; empty if they can run in slices."""
        return self.refused or ("rows of packed documents differ in length" if self.packed else "")


class HeadProfile(LinearHead):
    """The linear head that a model ends with, where devices can divide its rows (``cost/divided_head.py``)."""

    row_parameters: Positive
    """Parameter values of one row."""
    share: Annotated[float, Field(ge=0, le=1)]
    """The part of the last layer's operations that is its product and the loss."""
    input_bytes: Bytes
    """What it reads of one sample, as the model hands it on."""

    @property
    def operand_bytes(self) -> float:
        """Bytes of what one sample's product reads."""
        return float(self.width * self.tokens * self.inputs)

    def rows_of(self, shares: int) -> int:
        """Return the rows of the largest of so many shares."""
        return -(-self.rows // shares)


class LinkFit(Spec):
    """A link, over which a message of ``n`` bytes takes ``alpha_s + n * beta_s_per_byte`` seconds."""

    alpha_s: Seconds
    beta_s_per_byte: Seconds
    error: Annotated[float, Field(ge=0)] = 0.0
    """Largest relative error over the measured sizes; 0 if not measured."""

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of one message."""
        return self.alpha_s + size_bytes * self.beta_s_per_byte

    def shared(self, users: float) -> Self:
        """Return the link as each of ``users`` senders has it, that share its bandwidth."""
        return self.model_copy(update={"beta_s_per_byte": self.beta_s_per_byte * max(1.0, users)})


class CollectivePath(LinkFit):
    """The link that collectives between hosts use, and how their library uses it."""

    algorithm: Literal["ring", "rabenseifner", "tree"] | None = None
    """The library's only algorithm; None: it chooses the fastest for each size and group."""
    piece_bytes: Annotated[float, Field(ge=1, le=1e21)] | None = None
    """Size of the pieces into which the library cuts a vector, each a separate collective; None: one piece."""
    at_once: Devices = 1
    """Pieces in flight at the same time."""


class Reserved(Spec):
    """Memory of a device that no tensor can have, beside what its process takes; see ``DeviceModel.reserved``."""

    libraries_bytes: Bytes = 0.0
    """Workspaces of libraries and pools of graphs."""
    fragmentation_bytes: Bytes = 0.0
    """Gaps of the allocator where the device is full."""
    headroom_bytes: Bytes = 0.0
    """Memory that plans leave free."""
    group_bytes: Bytes = 0.0
    """Buffers of a communicator of a group."""
    edge_bytes: Bytes = 0.0
    """Buffers of a communicator between two stages, where it receives."""
    context_bytes: Bytes = 0.0
    """What another process takes of the device before it allocates anything: one that compiles beside steps."""

    @property
    def fixed_bytes(self) -> float:
        """Return what does not depend on the plan."""
        return self.libraries_bytes + self.fragmentation_bytes + self.headroom_bytes


class CollectiveFit(Spec):
    """Measured cost of one collective at one group size."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    group: Annotated[int, Field(ge=2)]
    """Devices that take part."""
    model: Literal["ring", "rabenseifner", "tree"]
    """The formula of ``cost/collectives.py`` that fits best."""
    alpha_s: Seconds
    beta_s_per_byte: Seconds
    error: Annotated[float, Field(ge=0)] = 0.0


class TakenFor(Spec):
    """The job keys for which a measured profile is valid."""

    model: dict[str, Any]
    """``model`` of the job, as JSON."""
    optimizer: str
    compiled: bool = False
    """``train.compile: inductor``: layers were measured compiled. With ``auto``, a run may stay eager."""
    activation_memory_budget: float = 1.0

    @classmethod
    def job(cls, job: JobSpec) -> TakenFor:
        """Return the keys of a job."""
        train = job.train
        compiled = train.compile == "inductor"
        return cls(
            model=job.model.model_dump(mode="json"),
            optimizer=train.optimizer,
            compiled=compiled,
            activation_memory_budget=job.parallel.activation_memory_budget if compiled else 1.0,
        )


class Profile(Spec):
    """Everything the planner needs to know about a model on a cluster."""

    format: Literal[1] = 1
    """Version of the file format."""
    source: Literal["measured", "analytic"]
    device: str
    """Name of the device for which the times are valid."""
    accelerator_type: str = ""
    """Ray's ``accelerator_type`` of the device's node; empty: the node has none, or it is not known."""
    dtype: str
    """``train.dtype`` of the job for which the times are valid."""
    reduce_dtype: ReduceDtype | None = None
    """``parallel.reduce_dtype`` of the job that is planned, where it is not the gradients' own; see
    ``cost.stages.with_reduce_dtype``."""
    gathers_narrow: bool = False
    """``train.gathers_narrow`` of the job that is planned; see ``cost.stages.as_job_runs``."""
    taken_for: TakenFor | None = None
    """The job that it was measured for; None if computed."""
    batch_statistics: bool = False
    """Whether a sample's loss depends on the others of its micro-batch (batch norm): copies then divide nothing."""
    slicing: Slicing | None = None
    """How the model runs in slices of a sequence; None: not known, and no plan tries them."""
    devices: Devices
    """Devices of the cluster."""
    devices_per_host: Devices
    """Devices of the host that has most; ``alone`` compares one busy device with so many."""
    hosts: Annotated[tuple[Devices, ...], Field(strict=False)] = ()
    """Devices of each host, where hosts differ, in the order in which devices are numbered; further hosts, and all
    of them if this is empty, have ``devices_per_host``."""
    kind_of_host: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Kind of each of ``hosts``: 0 is this profile's, k is that of ``other_kinds[k - 1]``. Empty: there is one kind."""
    other_kinds: Annotated[tuple[Profile, ...], Field(strict=False)] = ()
    """Profiles of the cluster's other kinds of device, each as if there were no other; see ``cost/kinds.py``."""
    memory_bytes: Bytes
    """Total memory of one device."""
    base_bytes: Bytes = 0.0
    """Memory of a device's process before it holds a parameter: code, and the graph of a captured model."""
    code_bytes: Bytes = 0.0
    """Memory that kernels keep for one micro-batch size: oneDNN compiles code for each shape of a product."""
    reserved: Reserved = Reserved()
    """Memory that no tensor can have, beside these; of a measured one, communicators and the allocator's gaps."""
    communication_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a device's processors that a collective takes from the tasks that run beside it."""
    layers: Annotated[tuple[LayerProfile, ...], Field(strict=False, min_length=1)]
    head: HeadProfile | None = None
    """The head at the end of the last layer; None: it has none that can be divided, or it is not known."""
    shares: Devices = 1
    """Devices that divide the head's rows: ``layers`` ends with their shares and the loss; 1: the head is whole."""
    tied_parameters: Count = 0
    """Values of matrices that first and last layer share, counted in both; a stage with both holds them once."""
    trained_tied_parameters: Count | None = None
    """Those of ``tied_parameters`` that are trained. None: all are."""
    update_s_per_parameter: Seconds
    """Seconds of an optimizer step, per parameter value."""
    iteration_flops_s: Annotated[float, Field(gt=0)] | None = None
    """Operations a second of the iterations on ``LayerProfile.matrices``; None: ``update_s_per_parameter`` has them."""
    alone: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Time of a task on the only busy device of a host, over its time with all devices busy (as in ``layers``)."""
    noise: Noise = Noise()
    """Disturbances of the measurement."""
    experts: Devices = 1
    """Consecutive data-parallel copies that divide the experts of each layer, E."""
    context: Devices = 1
    """Consecutive data-parallel copies that divide each sequence, C; a layer's costs are those of its share."""
    task_overhead_s: Seconds = 0.0
    """Seconds of each task besides its kernels."""
    inside: LinkFit
    """Link between two devices of one host."""
    between: LinkFit
    """Link between two hosts."""
    collective: CollectivePath | None = None
    """Link between hosts for collectives, if they use another path than messages."""
    host_links: Devices = 1
    """Links to other hosts that one host can use at the same time: its network cards."""
    collectives: Annotated[tuple[CollectiveFit, ...], Field(strict=False)] = ()
    """Measured collectives; without any, their costs follow from the links."""

    @model_validator(mode="after")
    def _kinds_of_hosts(self) -> Profile:
        """Check that every host has a kind, and every kind a profile of its own."""
        if not self.other_kinds and not self.kind_of_host:
            return self
        known = self.kind_of_host and len(self.kind_of_host) == len(self.hosts)
        if not known or max(self.kind_of_host) > len(self.other_kinds):
            raise ValueError("kind_of_host must give each of hosts a kind that has a profile")
        if any(other.other_kinds for other in self.other_kinds):
            raise ValueError("a profile among other_kinds is of one kind")
        if any(len(other.layers) != len(self.layers) for other in self.other_kinds):
            raise ValueError("the profiles of all kinds of device must be of the same layers")
        return self

    @model_validator(mode="after")
    def _trained_ties_are_some(self) -> Profile:
        if self.trained_tied > self.tied_parameters:
            raise ValueError("more tied parameters are trained than there are")
        return self

    @property
    def trained_tied(self) -> int:
        """Values of tied matrices that have a gradient, which their holders sum."""
        trained = self.trained_tied_parameters
        return self.tied_parameters if trained is None else trained

    @property
    def placed(self) -> Hosts:
        """Which host each device is on."""
        return Hosts(self.devices_per_host, self.hosts, self.kind_of_host)

    def on_hosts(self, counts: tuple[int, ...], kinds: tuple[int, ...] = ()) -> Profile:
        """Return the profile with ``counts`` devices on each host, in the order in which devices are numbered.

        ``kinds`` are those hosts' kinds, where there are several.
        """
        return self.model_copy(update={"hosts": counts, "kind_of_host": kinds})

    @property
    def kinds(self) -> tuple[Profile, ...]:
        """The profile of each kind of device and its hosts, as if there were no other."""
        if not self.other_kinds:
            return (self,)
        hosts = tuple(n for n, kind in zip(self.hosts, self.kind_of_host, strict=True) if kind == 0)
        alone = {"other_kinds": (), "kind_of_host": (), "hosts": hosts, "devices": sum(hosts) or self.devices}
        return (self.model_copy(update=alone), *self.other_kinds)

    @property
    def kind_name(self) -> str:
        """Return what a plan calls this kind of device: Ray's accelerator type, else the device's name."""
        return self.accelerator_type or self.device

    @property
    def device_names(self) -> str:
        """The names of all kinds of device, for people."""
        return " + ".join(kind.device for kind in self.kinds)

    def each_kind(self, change: Callable[[Profile], Profile]) -> Profile:
        """Return the profile with ``change`` made to that of every kind of device."""
        changed = change(self)
        return changed.model_copy(update={"other_kinds": tuple(map(change, self.other_kinds))})

    @property
    def exchanging(self) -> int:
        """Consecutive copies that exchange tokens, keys or values inside F, B and R; 1: none do."""
        return self.experts * self.context

    @property
    def exchanges(self) -> tuple[int, int]:
        """How many times ``exchanged_bytes`` travel in a forward, and in a backward.

        Tokens travel to experts and back, and so do their gradients; keys and values are gathered in the forward and in
        the backward, whose gradients are scattered then.
        """
        return (1, 2) if self.context > 1 else (2, 2)

    @property
    def process_bytes(self) -> float:
        """Return what a device's process takes beside the model, and what is kept free."""
        return self.base_bytes + self.code_bytes + self.reserved.fixed_bytes

    def at_speed(self, factor: float) -> Profile:
        """Return the profile with compute ``factor`` times as slow; links and collectives do not change."""
        layers = tuple(
            layer.model_copy(update={"times": {size: times.scaled(factor) for size, times in layer.times.items()}})
            for layer in self.layers
        )
        return self.model_copy(
            update={
                "layers": layers,
                "update_s_per_parameter": factor * self.update_s_per_parameter,
                "iteration_flops_s": self.iteration_flops_s and self.iteration_flops_s / factor,
                "task_overhead_s": factor * self.task_overhead_s,
            }
        )


MADE_BY = "raypipe profile JOB.yaml -o PROFILE.json"
"""The command that writes a profile."""


def load_profile(path: Path) -> Profile:
    """Read what ``raypipe profile -o`` wrote.

    Raises:
        SpecError: the file is missing, empty, no JSON, or not a profile; names the first wrong key.
    """
    return load_json(path, Profile, MADE_BY)
