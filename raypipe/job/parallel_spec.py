"""How to cut the work over devices: the ``parallel`` section of a job file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypipe.errors import SpecError
from raypipe.job.field_types import Count, CountKey, Positive, ReduceDtype, Spec, WireDtype
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.passes.shard import Gather
from raypipe.schedule.passes.sync import BY_LAYER
from raypipe.schedule.shape import Concat, Innermost, ParallelShape, Shape, Vocabulary, pipeline_shape

Shard = Literal["none", "zero1", "zero2", "zero3"]
GatherKey = Gather | Literal["order"]
"""A policy, or positions of the order's own."""
Shares = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(strict=False)]
Layers = Annotated[tuple[int | str, ...], Field(strict=False, min_length=1)]
SHAPE = {f.name for f in fields(ParallelShape)} - {"microbatches", "memory_limit"}
"""Keys of ``parallel`` that may be given to the planner, and that a plan keeps then: all of a shape but what follows
from the batch, and what the planner sets by the memory of the devices."""
SHARDING = ("shard", "gather", "shard_replicas")
"""Keys of ``parallel`` that say what replicas divide; they may be given to the planner too."""
INNERMOST = "innermost"
"""The key of ``parallel`` that says which devices are neighbours; it may be given to the planner too."""
BUDGET = "activation_memory_budget"
"""The key of ``parallel`` that says how much compiled stages keep."""
JOBS_OWN = ("transport", "wire_dtype", "reduce_dtype", "replan", "imbalance")
"""Keys of ``parallel`` that the job decides, whatever the plan."""
SAME_AS = {"dapple": "1f1b"}
"""Another name of a schedule."""
PLANNED = ("auto", "layers", "microbatches")
"""Values of ``recompute`` that leave something to the planner."""
DECIDED = {"schedule", "stages", "microbatch"}
"""Keys of ``parallel`` without which there is something left to choose."""


SEQUENCE_KEY = "parallel.sequence_parallel"


class ParallelSpec(Spec):
    """How to cut the work over devices. ``stages * replicas * tensor`` devices in all."""

    auto: bool = False
    """What is not given here is chosen by the planner when the run starts; ``parallel: auto`` gives nothing. Giving
    schedule, stages and microbatch leaves it nothing to choose, unless ``recompute`` asks it to."""
    schedule: str = "1f1b"
    """Name of a pipeline schedule (``raypipe schedule --list`` describes them), a file that holds one, or ``auto``."""
    placement: Literal["line", "ring", "v", "bidirectional", "encoder", "branches", "free"] = "line"
    """Where ``auto`` puts the stages; ``ring`` and ``v`` with ``chunks``, ``bidirectional`` with ``pipelines``.
    ``encoder``: a model of images (or other numbers) and tokens; each device has a stage of the encoder, which fills
    gaps, and one of what reads it (docs/guides/encoders.md).
    ``branches``: the model is no chain but a graph of branches (towers, encoder and decoder, Inception blocks); each
    device gets the operations, in as many stages as needed, with which a step is shortest, and a tensor goes straight
    to the devices that read it. In a plan also ``free``: any number of stages a device, as the plan's order says
    (``parallel: auto`` may find one)."""
    memory_limit: Annotated[float, Field(gt=0)] | None = None
    """Activations a device may hold at once, in units of one stage's for one micro-batch; null for no limit."""
    stages: Positive = 1
    """Devices along one pipeline."""
    replicas: Positive = 1
    """Data-parallel copies of the pipeline."""
    innermost: Innermost = "stages"
    """Which devices are neighbours, where several are on a host. ``stages``: those of one pipeline, so that activations
    stay inside hosts and gradients are summed between them. ``replicas``: the copies of one stage, so that sums,
    gathers and reduce-scatters stay inside hosts and activations go between them. Devices of several kinds are numbered
    the second way in any case, so that each copy has its share of each kind."""
    microbatch: Positive = 1
    """Sequences per micro-batch."""
    chunks: Positive = 1
    """Stages a device holds (interleaved schedules); the model is cut into ``stages * chunks``."""
    unit: Positive | None = None
    """ZeroPP's scheduling unit, in micro-batches."""
    pipelines: Positive = 2
    """Chimera's number of directed pipelines, half of them each way; an even number."""
    concat: Concat = "direct"
    """How Chimera goes past one micro-batch a device."""
    slices: Positive = 1
    """Slices that each micro-batch is cut into along the sequence, for causal models (docs/guides/long-sequences.md): a
    stage keeps the activations of slices, not of whole micro-batches. The sequence is a multiple of it."""
    vocabulary: Vocabulary = "whole"
    """``split``: the rows of a linear head's matrix are divided over the devices of the pipeline, with the optimizer's
    state of them, and each computes its share of the loss (docs/guides/vocabulary.md). For ``schedule: 1f1b``."""
    context: Positive = 1
    """Copies that divide each sequence among them, for causal models (docs/guides/long-sequences.md); ``replicas`` is a
    multiple of it. A copy computes two of ``2 * context`` equal parts of a sequence, from both of its ends, and gets
    the keys and values of the others for attention (context parallelism)."""
    shard: Shard = "none"
    """What the replicas divide instead of each holding it whole: optimizer state (``zero1``), gradients too
    (``zero2``), weights too (``zero3``)."""
    gather: GatherKey = "unit"
    """With ``shard: zero3``: which tasks of a stage share one gather of its weights. ``step``: all; ``unit``: the
    forwards of a scheduling unit, and its backwards; ``microbatch``: one each. ``order``: those that follow it in the
    order of the plan, where the planner searched positions, or of the schedule file."""
    shard_replicas: Positive | None = None
    """With ``shard``: consecutive replicas that divide a stage, for instance those of one node, while further ones hold
    the same; a divisor of ``replicas``. null: all."""
    sync: Literal["lazy", "eager", "eager-opt", "wait-free", "prioritised", "reverse-first-k"] = "lazy"
    """When gradients are summed over replicas. ``lazy``: after the device's last backward;
    ``eager``: as soon as the stage's own gradients are complete; ``eager-opt``: so where the device would idle.
    A sum right after a stage's last backward begins in it, bucket by bucket; ``wait-free`` has all of them there.
    ``prioritised``: what the next forward needs first goes first, and each layer is updated when its own sum is in,
    before the next step reads it; there is no barrier between steps, and so no ``train.clip``.
    ``reverse-first-k``: so, and the weight gradients of a stage's first layers wait until its backward has ended; then
    they are computed from the first layer on (``first_k``)."""
    first_k: Count | None = None
    """With ``sync: reverse-first-k``: how many layers' weight gradients wait, in each stage, from the fourth step on
    where ``memory_cap_mb`` limits it. null: each stage's is chosen from measured times after 8 steps, among those that
    fit ``memory_cap_mb``, or else the worker's share of its host's memory, and taken back after 16 where steps have not
    become shorter."""
    side_stream: dict[CountKey, Count] | None = None
    """On one device: run weight gradients and updates on a second stream beside forwards and input gradients, as
    ``raypipe regions`` plans it (multi-region joint scheduling). Per stage whose weight gradient runs beside the next
    step's forward, the stage before whose forward it begins; ``{}``: all run in the backward, where the order has them.
    On a GPU the stream is a CUDA stream of lower priority, on a CPU a thread. null: one stream."""
    update: RequestedNormPolicy = "auto"
    """What a weight update does about ``train.clip``'s global norm. ``wait``: wait for it; ``optimistic``: made at
    once, and undone should the norm turn out too large; ``auto``: optimistic where steps follow one another
    faster for it and the last norm was within the limit. The results are the same."""
    replan: bool | None = None
    """Plan again on measured task times while the job runs, and keep what makes steps shorter: another order where it
    was searched for, else where weight gradients go and when gradients are summed. null: where it was searched,
    with ``shard: none``."""
    transport: Literal["auto", "shm", "gloo", "nccl", "pinned", "ray-collective"] = "auto"
    """What carries activations. ``auto`` picks per edge what is fastest there."""
    wire_dtype: WireDtype | None = None
    """What floating-point activations and gradients are cast to on their way between devices, and back on arrival:
    fewer bytes, rounded values. null: bfloat16 where ``train.dtype`` is, which float32 turns off; else they go as they
    are, and the plan does not change the result."""
    reduce_dtype: ReduceDtype | None = None
    """What gradients are cast to while they are summed over replicas, and back. ``bfloat16``: half the bytes of float32
    sums, rounded to 8 bits before and in each addition. ``float32``: with ``train.dtype: bfloat16-true``, sums that
    are rounded only at the end, for twice the bytes. null: their own dtype."""
    recompute: Literal["none", "full", "stage-aware", "layers", "microbatches", "auto"] | Layers = "none"
    """Activations to recompute instead of keeping, while the device waits for the gradient; beside what the schedule
    recomputes by itself. ``full``: all of them. ``stage-aware`` (Merak): those of a share of each stage's layers, which
    ``alphas`` gives or the run finds. A list: those of these layers alone, by number, name or pattern (``block.*``).
    ``layers``, ``microbatches``: the planner decides when the run starts, with all else as given, how many of each
    stage's last layers, or of its micro-batches, memory forces it to recompute; a plan that fits recomputes nothing.
    ``auto``: the same, whichever of the two is faster."""
    alphas: Annotated[float, Field(ge=0, le=1)] | Shares | None = None
    """With ``recompute: stage-aware``: the share of a stage's layers that keeps its activations. A list has one per
    stage; a number is the first stage's, from which the others follow so that all use the same memory (Merak). null:
    the run raises it between steps as far as ``memory_cap_mb`` allows."""
    memory_cap_mb: Annotated[float, Field(gt=0)] | None = None
    """MiB that a device may have allocated at its fullest moment, up to where a run raises ``alphas``, or postpones
    weight gradients (``first_k``, on CPUs): of its process's heap, on GPUs of torch's allocator."""
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] = 1.0
    """With ``train.compile``: share of its activations that a compiled stage keeps from forward to backward; the
    backward computes the others again. 1: all but what is cheap to compute; 0: the stage's inputs alone. Stages that
    the plan recomputes keep what the plan says. With ``auto: true`` and ``compile: inductor``, leave it out to have it
    chosen where memory is short."""
    keep: Shares | None = None
    """Where activations are recomputed: per stage, the share of its micro-batches that keep them all the same."""
    tensor: Positive = 1
    """Devices that share each layer."""
    sub_pipelined: bool = False
    """With ``tensor``: each micro-batch in two halves, of which one computes while the other's sums are under way."""
    sequence_parallel: bool = False
    """With ``tensor``: between divided layers, each device computes and keeps a T-th of the positions (norms, dropout,
    residual sums), and sends a T-th of them to the next stage. ``auto``: wherever the model allows it."""
    tensor_table: str | None = None
    """File that says which layers are divided (docs/guides/tensor.md); null for the table of the model's family."""

    experts: Positive = 1
    """Copies that divide the experts of each mixture-of-experts layer among them; ``replicas`` is a multiple of it.
    Each token goes to the copies that hold its experts and back (expert parallelism, docs/guides/experts.md). 1: every
    copy holds all experts. ``auto``: the planner decides when the run starts, with all else as given."""
    expert_order: Annotated[tuple[Annotated[tuple[int, ...], Field(strict=False)], ...], Field(strict=False)] = ()
    """With ``experts``: for each layer that has some, in the model's order, their numbers in the order in which copies
    hold them, the first 1/E of them the first copy. Not given: ascending, but where E is chosen with measured loads,
    which the planner then evens out."""
    imbalance: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """For the planner: rows that the busiest of the copies which divide experts computes in a layer, over the mean. 1:
    loads are even. Not given: as measured for each layer, where costs are measured; else 1."""

    def shape(self, batch: int) -> Shape:
        """The shape of one data-parallel copy's schedule, for mini-batches of ``batch`` sequences.

        Raises:
            ScheduleError: an impossible one.
        """
        return pipeline_shape(self, batch // (self.microbatch * self.sample_copies))

    @property
    def sample_copies(self) -> int:
        """Copies with samples of their own: several that divide each sequence count as one."""
        return max(1, self.replicas // self.context)

    @property
    def postpones(self) -> bool:
        """Return whether weight gradients of the first layers wait."""
        return self.sync == "reverse-first-k"

    @property
    def by_layer(self) -> bool:
        """Return whether layers are updated one by one, each when its own sum is in."""
        return self.sync in BY_LAYER

    @property
    def late_updates(self) -> bool:
        """Return whether an update may still be made while the next step runs: there is no barrier between steps."""
        return self.by_layer or self.side_stream is not None

    @property
    def replans(self) -> bool:
        """Return whether a running job plans again."""
        if self.placement == "branches":
            return False
        return self.schedule == "auto" and self.shard == "none" if self.replan is None else self.replan

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, whatever their value, without ``auto``."""
        return {key: getattr(self, key) for key in sorted(self.model_fields_set - {"auto"})}

    def allows(self, plan: ParallelSpec) -> bool:
        """Return whether a plan has the shape that is given here beside ``auto``."""
        return all(
            getattr(plan, key) == (SAME_AS.get(wish, wish) if key == "schedule" else wish)
            for key, wish in self.given.items()
            if key in SHAPE or key in (*SHARDING, INNERMOST, BUDGET, "experts")
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
        if isinstance(data, Mapping) and data.get("experts") == "auto":
            return {key: value for key, value in data.items() if key != "experts"} | {"auto": True}
        if isinstance(data, Mapping) and data.get("recompute") in PLANNED:
            return {**data, "auto": True}
        if isinstance(data, Mapping) and data.get("auto") is True and data.keys() >= DECIDED:
            return {**data, "auto": False}
        return data


def check_expert_order(orders: Sequence[Sequence[int]], counts: Mapping[str, int]) -> None:
    """Check that there is an order for each layer with experts, of all its experts; ``counts``: how many, by layer.

    Raises:
        SpecError: there is not.
    """
    if len(orders) != len(counts):
        why = f"{len(orders)} orders for {len(counts)} layers with experts"
        raise SpecError("parallel.expert_order", why, "give one for each, or leave it out")
    for order, (layer, count) in zip(orders, counts.items(), strict=True):
        if sorted(order) != list(range(count)):
            why = f"{list(order)} does not name each of the {count} experts of {layer} once"
            raise SpecError("parallel.expert_order", why, "count from 0, or leave it out")


def check_chunks(positions: int, copies: int) -> None:
    """Check that a sequence divides into two equal chunks for each of ``copies`` copies.

    Raises:
        SpecError: it does not; it names the nearest numbers that work.
    """
    if positions % (2 * copies) == 0:
        return
    fits = [n for n in range(1, positions // 2 + 1) if positions % (2 * n) == 0]
    near = min(fits, key=lambda n: abs(n - copies), default=1)
    low = positions // (2 * copies) * 2 * copies
    lengths = " or ".join(str(n) for n in (low, low + 2 * copies) if n)
    why = f"a sequence of {positions} does not divide into {2 * copies} equal chunks, two for each of {copies}"
    raise SpecError("parallel.context", why, f"use context: {near}, or sequences of {lengths}")


def zero_level(shard: Shard) -> int:
    """Return the ZeRO level that a word means.

    >>> zero_level("none"), zero_level("zero3")
    (0, 3)
    """
    return 0 if shard == "none" else int(shard.removeprefix("zero"))


def check_positions(lengths: Iterable[int], size: int) -> None:
    """Check that sequences of these lengths divide over ``size`` tensor ranks.

    Raises:
        SpecError: one does not; the error names the nearest that would.
    """
    for length in lengths:
        if length % size:
            near = " or ".join(str(n) for n in (length // size * size, -(-length // size) * size) if n)
            raise SpecError(
                SEQUENCE_KEY,
                f"{length} positions do not divide over tensor = {size}",
                f"use false, or sequences of {near}",
            )
