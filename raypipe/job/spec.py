"""The job file as typed data: each field says what it means, in which unit, and what is allowed.

Keys and their spelling are CONTRACT.md's. A spec is immutable and complete: defaults are filled in, so that what
a run directory records is what ran. Rules between fields are in ``check``; reading files is in ``load``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypipe.errors import SpecError
from raypipe.job.field_types import Count, Positive, Share, Spec, WireDtype
from raypipe.job.model_spec import ModelSpec
from raypipe.schedule.shape import Shape

__all__ = ["Count", "DataSpec", "EarlyStopSpec", "JobSpec", "ParallelSpec", "Positive", "Share", "Spec", "TrainSpec"]


class DataSpec(Spec):
    """What to train on."""

    type: Literal["bytes", "lines", "arrays"] = "bytes"
    """``bytes``: text files read as bytes, one token each, in windows of one length. ``lines``: each line of such files
    (or ``text`` of each record of a ``.jsonl`` file) is a sample of its own length. ``arrays``: a file of named arrays,
    one row per sample, whose lengths may differ; the names are those of the model's arguments, and ``labels``."""
    path: Annotated[str, Field(min_length=1)]
    """``stdlib`` (this Python's own library sources), or a file, a folder or a glob of text; for arrays, an ``.npz`` or
    ``.safetensors`` file."""
    held_out: Annotated[str, Field(min_length=1)] | None = None
    """A second file of arrays to validate on; without it, a tenth of the samples is held out."""
    pad_to_multiple_of: Positive = 8
    """Where samples have their own lengths, a micro-batch is padded to its longest one's, rounded up to a multiple of
    this: so that few shapes exist."""
    mask: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the bytes that a masked language model is to guess."""


class EarlyStopSpec(Spec):
    """When to give up: validation no longer improves."""

    patience: Positive
    """Validations in a row without an improvement after which the run stops."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much lower than the lowest before a validation loss must be to count as an improvement."""


class TrainSpec(Spec):
    """How to train: optimizer, length, precision, how often to look and to save."""

    steps: Positive
    """Optimizer steps of the whole run."""
    batch: Positive
    """Mini-batch: sequences a step, over all replicas."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """``adamw`` decays weights apart from the gradient; ``adam`` and ``sgd`` add the decay to it."""
    lr: Annotated[float, Field(gt=0)] = 0.001
    """Peak learning rate."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's guard against division by zero."""
    momentum: Share = 0.0
    """SGD's momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay rate, applied to every parameter."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up, from ``lr`` down to ``min_lr`` at the last step."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises linearly to ``lr``."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where ``cosine`` and ``linear`` end."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest global gradient norm (L2, over all stages); null for none."""
    seed: Count = 0
    """Start weights, order of the data and dropout all follow from it."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic. ``bfloat16`` is autocast over float32 weights."""
    deterministic: bool = False
    """Refuse kernels whose result may differ between two runs."""
    eval_every: Count = 0
    """Steps between validations; 0 for none but the one at the end."""
    eval_batches: Positive = 8
    """Mini-batches of held-out data per validation."""
    early_stop: EarlyStopSpec | None = None
    """Stop before ``steps`` once validation no longer improves; null to go on to the end."""
    load_best_at_end: bool = False
    """Take the checkpoint with the lowest validation loss as the outcome, instead of the last one."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 for none but the one at the end."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""
    max_failures: Count = 3
    """Restarts from the last checkpoint before the run gives up."""
    wait_for_devices_s: Annotated[float, Field(ge=0)] | None = 3600.0
    """Seconds to wait for devices that other jobs have, or that an autoscaler has yet to start; null for no limit."""
    message_timeout_s: float = 300.0
    """Seconds a device waits for a message before it fails with its name: from 1 to a week."""

    @property
    def crossing_dtype(self) -> str:
        """Of the floating-point tensors between two stages: the weights', which autocast leaves as it is."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint with the lowest validation loss is kept beside the newest."""
        return self.early_stop is not None or self.load_best_at_end


Shares = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(strict=False)]
Again = Annotated[tuple[int | str, ...], Field(strict=False, min_length=1)]
SHAPE = {"schedule", "stages", "replicas", "microbatch", "chunks", "unit", "pipelines", "concat"}
"""Keys of ``parallel`` that a plan keeps as they were given to the planner."""
SAME_AS = {"dapple": "1f1b"}
"""Another name of a schedule."""
DECIDED = {"schedule", "stages", "microbatch"}
"""Keys of ``parallel`` without which there is something left to choose."""


class ParallelSpec(Spec):
    """How to cut the work over devices. ``stages * replicas * tensor`` devices in all."""

    auto: bool = False
    """What is not given here is chosen by the planner when the run starts; ``parallel: auto`` gives nothing. Giving
    schedule, stages and microbatch leaves it nothing to choose, unless ``recompute`` is ``auto``."""
    schedule: str = "1f1b"
    """Name of a pipeline schedule (``raypipe schedule --list`` describes them), a file that holds one, or ``auto``."""
    placement: Literal["line", "ring", "v", "bidirectional"] = "line"
    """Where ``auto`` puts the stages; ``ring`` and ``v`` with ``chunks``, ``bidirectional`` with ``pipelines``."""
    memory_limit: Annotated[float, Field(gt=0)] | None = None
    """Activations a device may hold at once, in units of one stage's for one micro-batch; null for no limit."""
    stages: Positive = 1
    """Devices along one pipeline."""
    replicas: Positive = 1
    """Data-parallel copies of the pipeline."""
    microbatch: Positive = 1
    """Sequences per micro-batch."""
    chunks: Positive = 1
    """Stages a device holds (interleaved schedules); the model is cut into ``stages * chunks``."""
    unit: Positive | None = None
    """ZeroPP's scheduling unit, in micro-batches."""
    pipelines: Positive = 2
    """Chimera's number of directed pipelines, half of them each way; an even number."""
    concat: Literal["direct", "doubling", "halving"] = "direct"
    """How Chimera goes past one micro-batch a device."""
    shard: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """What the replicas split between them instead of each holding it."""
    sync: Literal["lazy", "eager", "eager-opt", "wait-free", "prioritised", "reverse-first-k"] = "lazy"
    """When gradients are summed over replicas. ``lazy``: after the device's last backward;
    ``eager``: as soon as the stage's own gradients are complete; ``eager-opt``: so where the device would idle."""
    update: Literal["auto", "wait", "optimistic"] = "auto"
    """What a weight update does about ``train.clip``'s global norm. ``wait``: wait for it; ``optimistic``: made at
    once, and undone should the norm turn out too large; ``auto``: optimistic where steps follow one another
    faster for it and the last norm was within the limit. The results are the same."""
    replan: bool | None = None
    """Plan again on measured task times while the job runs, and keep what makes steps shorter: another order where it
    was searched for, else where weight gradients go and when gradients are summed. null: where it was searched."""
    transport: Literal["auto", "shm", "gloo", "nccl", "ray-collective"] = "auto"
    """What carries activations. ``auto`` picks per edge what is fastest there."""
    wire_dtype: WireDtype | None = None
    """What floating-point activations and gradients are cast to on their way between devices, and back on arrival:
    fewer bytes, rounded values. null: they go as they are, and the plan does not change the result."""
    recompute: Literal["none", "full", "stage-aware", "auto"] | Again = "none"
    """Activations to compute again instead of keeping, while the device waits for the gradient; beside what the
    schedule recomputes by itself. ``full``: all of them. ``stage-aware``: those of a share of each stage's layers, see
    ``alphas``. A list: those of these layers alone, by number, name or pattern (``block.*``). ``auto``: the planner
    decides when the run starts, with all else as given: nothing, some layers or some micro-batches of each stage, as
    its memory asks for."""
    alphas: Annotated[float, Field(ge=0, le=1)] | Shares | None = None
    """With ``recompute: stage-aware``: the share of a stage's layers that keeps its activations. A list has one per
    stage; a number is the first stage's, from which the others follow so that all use the same memory (Merak). null:
    the run raises it between steps as far as ``memory_cap_mb`` allows."""
    memory_cap_mb: Annotated[float, Field(gt=0)] | None = None
    """MiB that a device may have allocated at its fullest moment, up to where a run raises ``alphas``: of its process's
    heap, on GPUs of torch's allocator."""
    keep: Shares | None = None
    """Where activations are recomputed: per stage, the share of its micro-batches that keep them all the same."""
    tensor: Positive = 1
    """Devices that share each layer."""
    sub_pipelined: bool = False
    """With ``tensor``: each micro-batch in two halves, of which one computes while the other's sums are under way."""
    tensor_table: str | None = None
    """File that says which layers are divided (docs/guides/tensor.md); null for the table of the model's family."""

    def shape(self, batch: int) -> Shape:
        """The shape of one data-parallel copy's schedule, for mini-batches of ``batch`` sequences.

        Raises:
            ScheduleError: an impossible one.
        """
        return Shape(
            devices=self.stages, microbatches=batch // (self.microbatch * self.replicas), chunks=self.chunks,
            unit=self.unit, pipelines=self.pipelines, concat=self.concat, memory_limit=self.memory_limit,
        )  # fmt: skip

    @property
    def replans(self) -> bool:
        """Whether a running job plans again."""
        return self.schedule == "auto" if self.replan is None else self.replan

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, whatever their value, without ``auto``."""
        return {key: getattr(self, key) for key in sorted(self.model_fields_set - {"auto"})}

    def allows(self, plan: ParallelSpec) -> bool:
        """Whether a plan has the shape that is given here beside ``auto``."""
        return all(
            getattr(plan, key) == (SAME_AS.get(wish, wish) if key == "schedule" else wish)
            for key, wish in self.given.items()
            if key in SHAPE
        )

    @property
    def devices(self) -> int:
        """Devices of the whole job."""
        return self.stages * self.replicas * self.tensor

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, data: object) -> object:
        if data == "auto":
            return {"auto": True}
        if isinstance(data, Mapping) and data.get("recompute") == "auto":
            return {**data, "auto": True}
        if isinstance(data, Mapping) and data.get("auto") is True and data.keys() >= DECIDED:
            return {**data, "auto": False}
        return data


class JobSpec(Spec):
    """One training job: the whole file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Used for the run directory and in the Ray dashboard: letters, digits, dot, dash, underscore."""
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelSpec = ParallelSpec()

    @property
    def tokens_per_sample(self) -> int:
        """Most tokens of a sample of text; 1 for a sample of arrays."""
        return (self.model.sequence or 1) if self.data.type != "arrays" else 1

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.train.batch // self.parallel.microbatch

    @model_validator(mode="after")
    def _rules(self) -> JobSpec:
        # Imported late: the rules read the specs. SpecError passes through pydantic as it is.
        from raypipe.job.check import problems

        for key, why, fix in problems(self):
            raise SpecError(key, why, fix)
        return self
