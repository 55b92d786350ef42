"""The profile: what each layer of a model costs on one device, and what the links between devices cost.

The one form in which costs reach the planner, whether measured (``raypipe profile``) or computed from a description
of the machine. Times in seconds, sizes in bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from raypipe.cost.noise import Noise
from raypipe.job.field_types import Positive, Spec
from raypipe.job.json_file import load_json
from raypipe.job.spec import JobSpec

Seconds = Annotated[float, Field(ge=0, le=1e9)]
"""Bounded, like bytes and counts, so that no sum of many overflows: thirty years."""
Bytes = Annotated[float, Field(ge=0, le=1e21)]
Count = Annotated[int, Field(ge=0, le=10**18)]


class TaskTimes(Spec):
    """Seconds of each task of one layer for one micro-batch."""

    forward: Seconds
    input_grad: Seconds
    """B alone, where the backward is split."""
    weight_grad: Seconds
    """W alone, where the backward is split."""
    joint: Seconds
    """BW: both gradients in one pass, which may take less than B plus W."""
    recompute: Seconds
    """R: the forward again, gradients recorded."""
    spread: Annotated[float, Field(ge=0)] = 0.0
    """Half of the range between the quartiles of the forward's samples, over their median; 0 where computed."""

    def scaled(self, factor: float) -> TaskTimes:
        """On a device that takes ``factor`` times as long."""
        tasks = ("forward", "input_grad", "weight_grad", "joint", "recompute")
        return self.model_copy(update={task: factor * getattr(self, task) for task in tasks})


class LayerProfile(Spec):
    """One layer: the smallest piece that a cut of the model can move from one stage to another."""

    name: str
    parameters: Count
    """Values in its parameters; a tied matrix counts in each layer that holds it."""
    times: dict[Positive, TaskTimes]
    """By micro-batch size, in samples."""
    kept_bytes: Bytes
    """Activations of one sample kept from the forward to the end of the backward, its input included."""
    kept_fixed_bytes: Bytes = 0.0
    """Kept by every micro-batch whatever its size, until a joint backward."""
    cast_bytes: Bytes = 0.0
    """Autocast's narrow copies of the weights, which all micro-batches of a step share."""
    waiting_bytes: Bytes | None = None
    """Where the backward is split, what one sample keeps from B to W: inputs of products and the gradients of their
    outputs. None: as much as from F to B."""
    read_bytes: Bytes = 0.0
    """Raw inputs of one sample that it reads beside what the layer before hands it, where they are arrays."""
    output_bytes: Bytes
    """Of one sample, all tensors that cross a cut right after this layer; 0 for the last layer."""
    output_floats: Bytes | None = None
    """As much of ``output_bytes`` as are floating-point values, as wide as the weights; None: all of it."""
    message_bytes: Bytes | None = None
    """Of one sample, what a message carries behind this layer where that is not ``output_bytes``: see ``narrowed``."""
    workspace_bytes: Bytes = 0.0
    """Memory for one sample at the worst moment of its joint backward, beside what is kept."""
    workspace_fixed_bytes: Bytes = 0.0
    """The same whatever the micro-batch's size: the gradient of a matrix before it is added to the sum."""
    split_workspace_bytes: Bytes | None = None
    """As ``workspace_bytes``, for B where the backward is split; None: the same."""

    @property
    def waiting(self) -> float:
        """Of one sample, what is kept from B to W."""
        return self.kept_bytes if self.waiting_bytes is None else self.waiting_bytes

    @property
    def sent_bytes(self) -> float:
        """Of one sample, what a message behind this layer carries."""
        return self.output_bytes if self.message_bytes is None else self.message_bytes


class LinkFit(Spec):
    """Time of a message of ``n`` bytes over a link: ``alpha_s + n * beta_s_per_byte``."""

    alpha_s: Seconds
    beta_s_per_byte: Seconds
    error: Annotated[float, Field(ge=0)] = 0.0
    """Largest relative error over the measured sizes; 0 where given."""

    def seconds(self, size_bytes: float) -> float:
        """Time of one message."""
        return self.alpha_s + size_bytes * self.beta_s_per_byte


class CollectivePath(LinkFit):
    """The path of collectives between hosts where it is described, and how the library that runs them goes about it."""

    algorithm: Literal["ring", "rabenseifner", "tree"] | None = None
    """The only one it has; None: the fastest for each size and group."""
    piece_bytes: Annotated[float, Field(gt=0)] | None = None
    """Size of the pieces into which it cuts a vector, each a collective of its own; None: one piece."""
    at_once: Annotated[int, Field(ge=1)] = 1
    """Pieces under way at the same time."""


class CollectiveFit(Spec):
    """Measured cost of one collective at one group size."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    group: Annotated[int, Field(ge=2)]
    """Devices that take part."""
    model: Literal["ring", "rabenseifner", "tree"]
    """The formula that fits best; ``cost/collectives.py`` holds them."""
    alpha_s: Seconds
    beta_s_per_byte: Seconds
    error: Annotated[float, Field(ge=0)] = 0.0


class TakenFor(Spec):
    """What a measured profile was taken of: of anything else its costs say nothing."""

    model: dict[str, Any]
    """``model`` of the job, as JSON."""
    optimizer: str

    @classmethod
    def job(cls, job: JobSpec) -> TakenFor:
        """Of this job."""
        return cls(model=job.model.model_dump(mode="json"), optimizer=job.train.optimizer)


class Profile(Spec):
    """Everything the planner needs to know about a model on a cluster."""

    format: Literal[1] = 1
    """Version of this file's form."""
    source: Literal["measured", "analytic"]
    device: str
    """What the times hold for: a device's name."""
    dtype: str
    """``train.dtype`` of the job they were taken for."""
    taken_for: TakenFor | None = None
    """The job that it was measured for; None where computed."""
    devices: Annotated[int, Field(ge=1)]
    """Devices of the cluster."""
    devices_per_host: Annotated[int, Field(ge=1)]
    memory_bytes: Bytes
    """Of one device, all of it."""
    base_bytes: Bytes = 0.0
    """What a device's process takes before it holds a parameter: code, and the graph of a captured model."""
    code_bytes: Bytes = 0.0
    """What kernels keep for the shapes of one micro-batch size: oneDNN makes code for each shape of a product."""
    layers: Annotated[tuple[LayerProfile, ...], Field(strict=False, min_length=1)]
    tied_parameters: Count = 0
    """Values of matrices that two layers share: counted in both, trained once."""
    update_s_per_parameter: Seconds
    """Optimizer step."""
    alone: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Time of a task on a device whose host's others are idle, over its time when all are at work, as in ``layers``."""
    noise: Noise = Noise()
    """What disturbed the measurement."""
    task_overhead_s: Seconds = 0.0
    """Of each task, beside its kernels."""
    inside: LinkFit
    """Between two devices of one host."""
    between: LinkFit
    """Between two hosts."""
    collective: CollectivePath | None = None
    """Between hosts as collectives see it, where another path carries them than messages."""
    host_links: Annotated[int, Field(ge=1)] = 1
    """Links between hosts that one host can fill at the same time: its network cards."""
    collectives: Annotated[tuple[CollectiveFit, ...], Field(strict=False)] = ()
    """Measured ones; without, they follow from the links."""

    @property
    def process_bytes(self) -> float:
        """What a device's process takes beside the model."""
        return self.base_bytes + self.code_bytes

    def at_speed(self, factor: float) -> Profile:
        """The same where all that devices compute takes ``factor`` times as long; links and sums are what they were."""
        layers = tuple(
            layer.model_copy(update={"times": {size: times.scaled(factor) for size, times in layer.times.items()}})
            for layer in self.layers
        )
        return self.model_copy(
            update={
                "layers": layers,
                "update_s_per_parameter": factor * self.update_s_per_parameter,
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
