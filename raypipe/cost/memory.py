"""What a device holds, term by term, at its fullest moment.

Follows the runtime: float32 (or float64) weights whatever the arithmetic and one narrow copy of them under autocast, a
full set of weights, gradients and optimizer state for every stage replica, what autograd and the deferred weight
gradients keep of each micro-batch in flight, one flat vector per stage whose gradients are being summed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.stages import Cut, check_cut, gradient_width, parameters
from raypipe.errors import SpecError, nearest
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BACKWARD, WEIGHT_GRADIENTS
from raypipe.schedule.live_activations import recomputed_pairs
from raypipe.schedule.lowering.run_ahead import tasks_ahead
from raypipe.schedule.passes.sync import held
from raypipe.schedule.versions import weight_versions

Shard = Literal["none", "zero1", "zero2", "zero3"]
SHARDS: tuple[Shard, ...] = get_args(Shard)
STATES = {"adamw": 2, "adam": 2, "sgd": 0}
"""Values of optimizer state per parameter; SGD with momentum has one."""

RECOMPUTE, SMALLER, FEWER, STAGES = "recompute", "smaller micro-batches", "fewer of them in flight", "more stages"
WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "base": ("the process itself and what no tensor can fill take", ("devices with more memory",)),
    "weights": ("weights take", (STAGES,)),
    "gradients": ("gradients take", (STAGES,)),
    "optimizer": ("optimizer state takes", (STAGES, "a simpler optimizer")),
    "versions": ("older versions of the weights take", ("a schedule that flushes",)),
    "casts": ("narrow copies of the weights take", (STAGES,)),
    "undo": ("copies that can undo an update made before the gradient norm take", ("update: wait",)),
    "replicas": (
        "further stage replicas with their gradients and optimizer state take", ("a schedule of one direction",),
    ),
    "activations": ("activations of micro-batches in flight take", (RECOMPUTE, SMALLER, FEWER)),
    "inputs": ("raw inputs of a step take", ("a smaller mini-batch",)),
    "workspace": ("temporary memory of one backward takes", (SMALLER,)),
    "messages": ("messages to and from neighbours take", (SMALLER,)),
    "communication": ("buffers of gradient sums and gathers take", (STAGES, "sync: lazy")),
}  # fmt: skip
"""Per term: what it is, and what makes it smaller where there is room for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device at its fullest moment, by what they are for."""

    base: float = 0.0
    """What the process takes before the model."""
    weights: float = 0.0
    """Of the stages it holds for one direction."""
    gradients: float = 0.0
    optimizer: float = 0.0
    versions: float = 0.0
    """Snapshots of weights that forwards in flight used (PipeDream, PipeDream-2BW)."""
    casts: float = 0.0
    """Autocast's narrow copies of the weights, one for all micro-batches of a step and of each weight version."""
    undo: float = 0.0
    """What an update overwrote that was made before the global gradient norm was known, and its gradients."""
    replicas: float = 0.0
    """Stages of further directions (Chimera, GEMS), each with gradients and optimizer state of its own."""
    activations: float = 0.0
    """What micro-batches in flight keep."""
    inputs: float = 0.0
    """Raw inputs that the data's arrays hold, of a whole mini-batch; of two where a step reaches into the next."""
    workspace: float = 0.0
    """Of the task that runs at that moment."""
    messages: float = 0.0
    """A stage's incoming gradient and the one it sends on."""
    communication: float = 0.0
    """Flat vectors of gradient sums in progress; a stage's gathered weights where they are sharded."""

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.base + self.weights + self.gradients + self.optimizer + self.versions + self.casts + self.undo
            + self.replicas + self.activations + self.inputs + self.workspace + self.messages + self.communication
        )  # fmt: skip

    def terms(self) -> dict[str, float]:
        """Bytes by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def largest(self) -> str:
        """Name of the largest term of those that a plan can change."""
        return max(list(self.terms().items())[1:], key=lambda item: item[1])[0]

    def sentence(self, capacity: float | None = None, without: Collection[str] = ()) -> str:
        """What takes most, and with a capacity that does not suffice: by how much, and what would help.

        ``without``: ways of making a term smaller that are used up, ``RECOMPUTE`` and so on.

        >>> print(DeviceMemory(weights=2**30, activations=3 * 2**30).sentence(2 * 2**30))
        needs 4.00 GiB, 2.00 GiB more than there are: activations of micro-batches in flight take 3.00 GiB; recompute, \
smaller micro-batches or fewer of them in flight would lower that
        """
        name = "base" if capacity is not None and self.base >= capacity else self.largest
        what, known = WORDS[name]
        most = f"{what} {_gib(self.terms()[name])}"
        if capacity is None or self.total <= capacity:
            return f"needs {_gib(self.total)}: {most}"
        over = f"{_gib(self.total - capacity)} more than there are"
        ways = [way for way in known if way not in without]
        words = " or ".join([", ".join(ways[:-1]), *ways[-1:]] if len(ways) > 1 else ways)
        helps = f"; {words} would lower that" if words else ""
        return f"needs {_gib(self.total)}, {over}: {most}{helps}"


def device_memory(
    profile: Profile,
    cut: Cut,
    schedule: Schedule,
    microbatch: int,
    *,
    copies: int = 1,
    optimizer: str = "adamw",
    momentum: bool = False,
    shard: Shard = "none",
    ahead: bool = False,
    recomputed: Collection[int] | None = None,
) -> tuple[DeviceMemory, ...]:
    """Memory of each device of a schedule.

    Args:
        profile: what layers keep.
        cut: layers of each stage.
        schedule: placement, orders, recomputation, weight versions. Where it has AR tasks they say when gradients are
            summed; else this happens at the end.
        microbatch: samples of a full micro-batch.
        copies: data-parallel copies of the whole schedule, on devices of their own.
        optimizer: ``train.optimizer``.
        momentum: whether ``sgd`` has any.
        shard: what the holders of a stage split between them: optimizer state (``zero1``), gradients too (``zero2``),
            weights too (``zero3``, with one stage's weights gathered at a time). Rajbhandari et al. 2020 (ZeRO),
            section 5; ZeroPP, section 3.4, for the gathered stage.
        ahead: devices run ahead of the global gradient norm (``train.clip``, ``parallel.update``) and can undo.
        again: layers that an R computes again; all of its stage by default.

    Raises:
        SpecError: not a cut of this model, or an unknown optimizer.
    """
    check_cut(profile, cut, schedule.placement)
    if optimizer not in STATES:
        raise SpecError("train.optimizer", f'"{optimizer}" is unknown', nearest(optimizer, STATES))
    states = STATES[optimizer] + (1 if optimizer == "sgd" and momentum else 0)
    stages = _stages(profile, cut, schedule, microbatch, recomputed)
    holders = [copies * len({row[s] for row in schedule.placement}) for s in range(schedule.stages)]
    remade = recomputed_pairs(schedule)
    versions = weight_versions(schedule) if schedule.versions != "flush" else None
    own = held(schedule)
    # Devices read the whole mini-batch, that of other copies as well, each input once whatever reads it.
    steps = microbatch * float(schedule.size) * schedule.microbatches * copies * (1 if versions is None else 2)
    reads = [steps * max(profile.layers[i].read_bytes for i in layers) for layers in cut]
    base = profile.base_bytes + profile.code_bytes
    heads = tasks_ahead(schedule) if ahead and schedule.versions != "stash" else [0] * schedule.devices
    return tuple(
        _device(
            schedule, device, base, stages, holders, remade, own[device], states, shard,
            versions[device] if versions is not None else 0, heads[device], reads,
        )
        for device in range(schedule.devices)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stage:
    """Bytes of one stage replica; of one micro-batch id where that matters."""

    weights: float
    summed: float
    """Its gradients as one flat vector; a tied matrix is summed without."""
    kept: float
    waiting: float
    """From B to W."""
    arrived: float
    """What the stage before sent."""
    held: float
    """What a recomputed micro-batch keeps: what arrived, and what layers keep that are not computed again."""
    handed: float
    """As much of ``kept`` as is the very tensor that the stage before, on the same device, keeps as its output."""
    messages: float
    workspace: float
    casts: float
    """Narrow copies of the weights."""


def _stages(
    profile: Profile, cut: Cut, schedule: Schedule, microbatch: int, recomputed: Collection[int] | None
) -> list[_Stage]:
    samples = microbatch * float(schedule.size)
    width = gradient_width(profile.dtype)
    split = {t.stage for t in schedule.tasks() if t.kind == "W"}
    found = []
    for s, numbers in enumerate(cut):
        layers = [profile.layers[i] for i in numbers]
        # The executor holds a stage's output, with its graph, until the backward; the last stage's is a number.
        leaving = layers[-1].output_bytes * samples
        arriving = profile.layers[numbers[0] - 1].output_bytes * samples if numbers[0] else 0.0
        kept = sum(layer.kept_bytes for layer in layers) * samples + leaving
        fixed = sum(layer.kept_fixed_bytes for layer in layers)
        local = s > 0 and all(row[s] == row[s - 1] for row in schedule.placement)
        own = parameters(profile, numbers)
        ends = {0, len(profile.layers) - 1} & set(numbers)
        tied = float(profile.tied_parameters * width) if len(ends) == 2 else 0.0
        found.append(
            _Stage(
                weights=float(own * width), summed=float((own - (profile.tied_parameters if ends else 0)) * width),
                kept=kept + (fixed if s not in split else 0.0),
                waiting=sum(layer.waiting for layer in layers) * samples,
                arrived=arriving, handed=arriving if local else 0.0, messages=arriving + leaving,
                workspace=_workspace(layers, samples, s in split, tied),
                casts=sum(layer.cast_bytes for layer in layers),
                held=_held(profile, numbers, samples, arriving, recomputed),
            )
        )  # fmt: skip
    return found


def _held(
    profile: Profile, numbers: Sequence[int], samples: float, arriving: float, recomputed: Collection[int] | None
) -> float:
    """Bytes of a micro-batch between its F and its R."""
    held, before = arriving, True
    for i in numbers:
        layer, remade = profile.layers[i], recomputed is None or i in recomputed
        if not remade:
            held += layer.kept_bytes * samples + layer.kept_fixed_bytes
        if remade != before:  # what joins two segments is held beside what they keep
            held += (profile.layers[i - 1].output_bytes * samples) if i > numbers[0] else 0.0
        before = remade
    return held


def _workspace(layers: Sequence[LayerProfile], samples: float, split: bool, tied: float) -> float:
    """The worst moment of a stage's backward beside all that is kept at its start.

    By the time it reaches an earlier layer, what later ones kept is gone. ``tied`` bytes are the gradient of a matrix
    that first and last layer share: autograd holds the last layer's until it can add the first one's to it.
    """
    worst = freed = 0.0
    for k, layer in enumerate(reversed(layers)):
        if split:
            own = layer.workspace_bytes if layer.split_workspace_bytes is None else layer.split_workspace_bytes
            worst = max(worst, own * samples - freed)
            freed += (layer.kept_bytes - layer.waiting) * samples
        else:
            fixed = layer.workspace_fixed_bytes
            if tied and k == len(layers) - 1:
                fixed = max(fixed, 2 * tied)  # its own, and the sum
            worst = max(worst, layer.workspace_bytes * samples + fixed - freed)
            freed += layer.kept_bytes * samples + layer.kept_fixed_bytes - (tied if k == 0 else 0.0)
    return worst


class _Fullest:
    """Plays one device's order and remembers the fullest moment."""

    def __init__(
        self,
        static: DeviceMemory,
        stages: Sequence[_Stage],
        gradients: Sequence[float],
        primary: int,
        with_b: set[tuple[int, int]],
        versions: int,
    ) -> None:
        self.static, self.stages, self.gradients, self.primary = static, stages, gradients, primary
        self.versions = versions
        """Of the weights, that forwards in flight use."""
        self.with_b = with_b
        """(stage, micro-batch) that have a B on this device: its W does not end them if it comes first."""
        self.alive: dict[tuple[int, int], float] = {}
        # Sums that every task changes a little, kept up to date: there are as many moments as tasks.
        self.activations = self.mine = self.others = self.summed = self.casts = 0.0
        self.ran: set[tuple[int, int]] = set()
        """(stage, micro-batch) whose backward ran and whose B or W is still to come."""
        self.graded: set[tuple[int, int]] = set()
        self.reduced: set[tuple[int, int]] = set()
        self.cast: set[tuple[int, int]] = set()
        self.unsettled = 0.0
        self._most = 0.0
        self._terms: tuple[float, ...] = (0.0,) * 8

    def moment(self, workspace: float = 0.0, messages: float = 0.0) -> None:
        """Is it now?"""
        held = self.activations + self.casts
        changing = held + self.mine + self.others + self.summed + self.unsettled + workspace + messages
        if changing > self._most:
            self._most = changing
            self._terms = (
                self.activations, self.casts, self.mine, self.others, self.summed, self.unsettled, workspace, messages,
            )  # fmt: skip

    @property
    def best(self) -> DeviceMemory:
        """The fullest moment so far."""
        activations, casts, mine, others, summed, unsettled, workspace, messages = self._terms
        return replace(
            self.static, gradients=mine, replicas=self.static.replicas + others, activations=activations,
            casts=casts, workspace=workspace, messages=messages, undo=unsettled,
            communication=self.static.communication + summed,
        )  # fmt: skip

    def hold(self, key: tuple[int, int], size: float) -> None:
        """A micro-batch keeps so much from now on; 0 for the end of its life."""
        self.activations += size - self.alive.pop(key, 0.0)
        if size:
            self.alive[key] = size
        elif not self.alive:
            self.activations = 0.0  # and no rounding goes on

    def grade(self, stage: int, replica: int) -> None:
        """A stage replica has gradients from now on."""
        if (stage, replica) not in self.graded:
            self.graded.add((stage, replica))
            if replica == self.primary:
                self.mine += self.gradients[stage]
            else:
                self.others += self.gradients[stage]

    def reduce(self, stage: int, replica: int) -> None:
        """The sum of a stage replica's gradients is under way."""
        if (stage, replica) not in self.reduced:
            self.reduced.add((stage, replica))
            self.summed += self.stages[stage].summed

    def narrow(self, stage: int, replica: int) -> None:
        """Autocast has made its copies of a stage replica's weights."""
        if (stage, replica) not in self.cast:
            self.cast.add((stage, replica))
            self.casts += self.stages[stage].casts * self.versions

    def task(self, task: Task, recomputed: set[tuple[int, int]]) -> None:
        """One task of the order."""
        kind, s, mbs, replica = task
        if kind == "AR":
            self.reduce(s, replica)
            self.moment()
        stage = self.stages[s]
        if kind in ("F", "R"):
            self.narrow(s, replica)
        for mb in mbs:
            key = (s, mb)
            if kind == "F":
                handed = 0.0 if (s - 1, mb) in recomputed else stage.handed
                self.hold(key, stage.held if key in recomputed else stage.kept - handed)
                self.moment()
            elif kind == "R":
                self.hold(key, stage.kept)
                self.moment()
            elif key in self.ran:
                self.ran.discard(key)
                self.hold(key, 0.0)
            else:
                self.moment(stage.workspace, stage.messages)
                if kind in WEIGHT_GRADIENTS and key not in self.with_b:
                    self.hold(key, 0.0)
                else:  # a W that ran the backward leaves B the gradient to send
                    self.hold(key, stage.waiting if kind == "B" else stage.arrived)
                    self.ran.add(key)
            if kind in WEIGHT_GRADIENTS:
                self.grade(s, replica)
            if kind in BACKWARD:
                self.moment(messages=stage.messages)


def _device(
    schedule: Schedule,
    device: int,
    base: float,
    stages: Sequence[_Stage],
    holders: Sequence[int],
    recomputed: set[tuple[int, int]],
    own: Sequence[tuple[int, int]],
    states: int,
    shard: Shard,
    versions: int,
    head: int,
    reads: Sequence[float],
) -> DeviceMemory:
    level = SHARDS.index(shard)
    primary = own[0][1] if own else 0

    def share(stage: int, from_level: int) -> float:
        return stages[stage].weights / (holders[stage] if level >= from_level else 1)

    first = [s for s, replica in own if replica == primary]
    more = [s for s, replica in own if replica != primary]
    fullest = _Fullest(
        DeviceMemory(
            base=base,
            weights=sum(share(s, 3) for s in first),
            optimizer=sum(states * share(s, 1) for s in first),
            inputs=max((reads[s] for s, _ in own), default=0.0),
            versions=sum(versions * stages[s].weights for s, _ in own),
            replicas=sum(share(s, 3) + states * share(s, 1) for s in more),
            communication=max((stages[s].weights for s, _ in own), default=0.0) if level == 3 else 0.0,
        ),
        stages, [share(s, 2) for s in range(len(stages))], primary,
        {(t.stage, mb) for t in schedule.orders[device] if t.kind == "B" for mb in t.mbs},
        max(1, versions),
    )  # fmt: skip
    # In the head of its order the last update may be undone; of 2BW it has yet to be made.
    copies = 0.0 if schedule.versions == "2bw" else sum(share(s, 3) + states * share(s, 1) for s, _ in own)
    unsettled = copies + sum(share(s, 2) for s, _ in own)
    for position, task in enumerate(schedule.orders[device]):
        fullest.unsettled = unsettled if position < head else 0.0
        fullest.task(task, recomputed)
    fullest.unsettled = 0.0
    if not fullest.reduced and level < 2:  # sharded gradients are summed piece by piece
        for stage, replica in own:
            if holders[stage] > 1:
                fullest.reduce(stage, replica)
        fullest.moment()
    return fullest.best


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
