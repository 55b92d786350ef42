"""Memory of each device of a schedule: its tasks are played in order, and the fullest moment counts.

Follows the runtime: float32 (or float64) weights whatever the arithmetic and one narrow copy of them under autocast
(those of products are gathered narrow), a full set of weights, gradients and optimizer state for every stage replica,
what autograd and the deferred weight gradients keep of each micro-batch in flight. Messages count from the task that
sends them to the task that uses them, at both ends, as long as no dependency rules that out (``held_messages``): a
sender keeps a copy until the receiver has taken it, and which of the two has it depends on their speed. Gradients of a
stage with several holders accumulate in the buckets that are reduced; only those of older weight versions are copied
there, one flat vector per stage, and those that are summed in another dtype. Of a sharded stage (``Schedule.sharding``)
a device holds its share, and the rest for as long as ``LiveShards`` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from raypipe.cost.kinds import process_bytes
from raypipe.cost.memory.parameter import parameter_bytes
from raypipe.cost.memory.stage import StageMemory, shares_input, stage_memory
from raypipe.cost.memory.terms import DeviceMemory
from raypipe.cost.profile import Profile, Reserved
from raypipe.cost.stages import Cut, check_cut, gradient_width, reduced_width, whole_matrices
from raypipe.schedule.ir import Schedule, Sharding, Task
from raypipe.schedule.kinds import BACKWARD, GRADIENTS, SHARDED, WEIGHT_GRADIENTS
from raypipe.schedule.live_activations import recomputed_pairs, weight_versions
from raypipe.schedule.lowering.messages_in_flight import held_messages
from raypipe.schedule.lowering.programs import tasks_ahead
from raypipe.schedule.passes.sync import are_copies, held, placement_of_copies
from raypipe.schedule.sharding import LiveShards, copies_of_experts, fewest_copies, run_groups


def device_memory(
    profile: Profile,
    cut: Cut,
    schedule: Schedule,
    microbatch: int,
    *,
    copies: int = 1,
    optimizer: str = "adamw",
    momentum: float = 0.0,
    ahead: bool = False,
    recomputed: Collection[int] | None = None,
    beside_shards: bool = False,
    captured: bool = False,
    compiling: bool = False,
) -> tuple[DeviceMemory, ...]:
    """Memory of each device of a schedule, in bytes.

    Args:
        profile: what layers keep.
        cut: layers of each stage.
        schedule: placement, orders, recomputation, weight versions. Its AR tasks, if it has any, say when gradients of
            older versions are reduced; without them this happens at the end. Its sharding and its AG, FREE and RS tasks
            say what holders of a stage divide, and how long the rest is there. Rajbhandari et al. 2020 (ZeRO), section
            5; ZeroPP, section 3.4.
        microbatch: samples of a full micro-batch.
        copies: data-parallel copies of the whole schedule, on devices of their own.
        optimizer: ``train.optimizer``.
        momentum: ``train.momentum``.
        ahead: devices run ahead of the global gradient norm (``train.clip``, ``parallel.update``) and can undo.
        recomputed: layers that an R computes again; all of its stage by default.
        beside_shards: without what is gathered of stages of level 3 and their full gradients, whatever the order has of
            AG, FREE and RS: what they may take is the rest of the device's memory.
        captured: compiled stages run as CUDA graphs of tasks, where the schedule allows it (``runtime.graphs.tasks``).
        compiling: stages are compiled beside steps (``TrainSpec.compiles_beside``).

    Raises:
        SpecError: the cut is not one of this model, or the optimizer is unknown.
    """
    check_cut(profile, cut, schedule.placement)
    each, samples = parameter_bytes(profile.dtype, optimizer, momentum), microbatch * float(schedule.size)
    split = {task.stage for task in schedule.tasks() if task.kind == "W"}
    versions = weight_versions(schedule) if schedule.versions != "flush" else None
    # Devices read the whole mini-batch, that of other copies as well, each input once whatever reads it.
    read = samples * schedule.microbatches * copies * (1 if versions is None else 2)
    backwards = schedule.backwards
    group = 1 if schedule.sharding is None else schedule.sharding.group or schedule.sharding.copies * copies
    setting = _Setting(
        schedule=schedule,
        base=process_bytes(profile, schedule.devices, copies),
        reserved=profile.reserved,
        stages=[
            stage_memory(
                profile,
                layers,
                samples,
                each,
                split=s in split,
                recomputed=recomputed,
                padding=whole_matrices(profile, layers, group).padding if schedule.zero_level(s) else 0,
            )
            for s, layers in enumerate(cut)
        ],
        shares_input=[
            shared and (s == 0 or backwards[s - 1].exists)  # else the stage before keeps no output
            for s, shared in enumerate(shares_input(schedule.placement))
        ],
        reads=[read * max(profile.layers[i].read_bytes for i in layers) for layers in cut],
        holders=[copies * len({row[s] for row in schedule.placement}) for s in range(schedule.stages)],
        group=group,
        again=copies_of_experts(group, profile.experts),
        recomputed=recomputed_pairs(schedule),
        cast_share=0.0 if profile.reduce_dtype is None else reduced_width(profile) / gradient_width(profile.dtype),
        beside_shards=beside_shards,
        captured=captured and schedule.sharding is None and schedule.versions == "flush",
    )
    communicators = _communicators(profile, cut, schedule, copies)
    heads = tasks_ahead(schedule) if ahead and schedule.versions != "stash" else [0] * schedule.devices
    messages = held_messages(schedule, [profile.layers[layers[-1]].sent_bytes * samples for layers in cut])
    return tuple(
        replace(
            _fullest(
                setting, device, own, versions[device] if versions is not None else 0, heads[device], messages[device]
            ),
            communicators=communicators[device],
            compiling=profile.reserved.context_bytes * compiling,
        )
        for device, own in enumerate(held(schedule))
    )


def _communicators(profile: Profile, cut: Cut, schedule: Schedule, copies: int) -> list[float]:
    """Return the bytes of each device's communicators: one that all devices share, those of ``run_groups``, and one
    from each neighbour, whatever it carries."""
    each, sharding, everyone = profile.reserved, schedule.sharding, schedule.devices * copies > 1
    known = schedule.exchange[0] if sharding is None else sharding.copies
    group, together = 1 if sharding is None else sharding.group or known * copies, max(profile.experts, profile.context)
    if known * copies % together:  # a copy by itself, with nobody to exchange anything with
        together = 1
    if known == 1:
        copies, group, together = fewest_copies(copies, group, together)
    if sharding is not None:
        sharding = replace(sharding, copies=known * copies, group=sharding.group and group)
    tied = profile.trained_tied > 0 and (len(cut) > 1 or schedule.zero_level(0) > 0)
    placement, of_experts, alike = placement_of_copies(schedule, copies), profile.context == 1, are_copies(schedule)
    opened = _opened(placement, sharding, known * copies, together, of_experts, tied, alike)
    result = []
    linked = [a + b for a, b in zip(schedule.graph.inputs(), schedule.graph.outputs(), strict=True)]
    for device, own in enumerate(held(schedule)):
        rows = [(schedule.placement[replica], s) for s, replica in own]
        neighbours = {row[other] for row, s in rows for other in linked[s]}
        groups, edges = everyone + opened[device], len(neighbours - {device})
        result.append(each.group_bytes * groups + each.edge_bytes * edges)
    return result


@lru_cache(64)
def _opened(
    placement: tuple[tuple[int, ...], ...],
    sharding: Sharding | None,
    copies: int,
    together: int,
    of_experts: bool,
    tied: bool,
    alike: bool,
) -> Counter[int]:
    """Return how many groups each device opens (``run_groups``), where copies that divide ``together`` do so with
    experts or with sequences."""
    ends = tuple(sorted({row[stage] for row in placement for stage in (0, -1)}))
    way = {"experts" if of_experts else "context": together}
    groups = run_groups(placement, sharding, copies, tied={"tied": ends} if tied else {}, in_order=alike, **way)
    return Counter(device for devices in groups.opened.values() for device in devices)


@dataclass(frozen=True)
class _Setting:
    """Settings that all devices of a schedule share."""

    schedule: Schedule
    base: Sequence[float]
    """Per device, with what is reserved."""
    reserved: Reserved
    stages: Sequence[StageMemory]
    shares_input: Sequence[bool]
    reads: Sequence[float]
    """Per stage, the raw inputs of a step."""
    holders: Sequence[int]
    """Per stage, the devices that hold it."""
    group: int
    """Devices that share one set of shards."""
    again: int
    """Those of them that hold the same experts, where copies divide these."""
    recomputed: set[tuple[int, int]]
    """(stage, micro-batch) with an R."""
    cast_share: float
    """Bytes of the copy in which gradients are summed, per byte of these; 0 if they are summed as they are."""
    beside_shards: bool
    """Gathered weights and full gradients count as nothing."""
    captured: bool
    """Tasks are CUDA graphs."""

    @cached_property
    def shares(self) -> list[StageMemory]:
        """Per stage, what one of its holders has of its weights, gradients and optimizer state."""
        levels = map(self.schedule.zero_level, range(len(self.stages)))
        return [stage.divided(level, self.group, self.again) for stage, level in zip(self.stages, levels, strict=True)]


def _fullest(
    setting: _Setting, device: int, own: Sequence[tuple[int, int]], versions: int, head: int, messages: Sequence[float]
) -> DeviceMemory:
    """A device's fullest moment.

    Args:
        setting: the schedule and its stages.
        device: which one.
        own: the (stage, replica) that it holds.
        versions: snapshots of weights that forwards in flight use.
        head: tasks at the start of its order that run before the last update is final.
        messages: per position of its order, messages of other tasks that it holds (``held_messages``). The most of them
            counts at every moment: when they come and go depends on the devices' speed.
    """
    schedule, stages, shares = setting.schedule, setting.stages, setting.shares
    primary = own[0][1] if own else 0
    first = [s for s, replica in own if replica == primary]
    more = [s for s, replica in own if replica != primary]
    in_flight = _most_in_flight(schedule.orders[device], setting.recomputed) if setting.captured else {}
    if in_flight:  # what a slot has is its own for good, and no other task's when its own do not run
        without = {"kept": 0.0, "kept_for_w": 0.0, "workspace": 0.0, "first_workspace": 0.0}
        played = [replace(stage, **without) for stage in stages]
        setting = replace(setting, stages=played, shares_input=[False] * len(stages))
    moments = _Moments(
        DeviceMemory(
            base=setting.base[device] - setting.reserved.fixed_bytes,
            libraries=setting.reserved.libraries_bytes,
            fragmentation=setting.reserved.fragmentation_bytes,
            headroom=setting.reserved.headroom_bytes,
            weights=sum(shares[s].weights + shares[s].frozen for s in first),
            optimizer=sum(shares[s].optimizer for s in first),
            inputs=max((setting.reads[s] for s, _ in own), default=0.0),
            versions=sum(versions * stages[s].weights for s, _ in own),
            replicas=sum(shares[s].state for s in more),
            messages=max(messages, default=0.0),
            graphs=sum(most * stages[s].slot for (s, _), most in in_flight.items()),
        ),
        setting,
        primary,
        {(t.stage, mb) for t in schedule.orders[device] if t.kind == "B" for mb in t.mbs},
        max(1, versions),
    )
    # In the head of its order the last update may be undone; of 2BW it has yet to be made.
    copies = 0.0 if schedule.versions == "2bw" else sum(shares[s].undo for s, _ in own)
    undo = copies + sum(shares[s].gradients for s, _ in own)
    moments.play(schedule.orders[device], head, undo)
    moments.undo = 0.0
    moments.moment(max((shares[s].update for s, _ in own), default=0.0))  # one stage replica is updated at a time
    if not moments.reduced:
        for stage, replica in own:
            if setting.holders[stage] > 1:
                moments.reduce(stage, replica)
        moments.moment()
    return moments.fullest


def _most_in_flight(order: Sequence[Task], recomputed: Collection[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return, by stage and replica, at most how many micro-batches are between a forward that keeps its activations and
    the last task that reads them; where there are forwards that keep nothing, another one."""
    tasks = [(task.kind, (task.stage, task.replica), mb) for task in order for mb in task.mbs]
    left = Counter((key, mb) for kind, key, mb in tasks if kind in GRADIENTS)
    now, most, brief = Counter[tuple[int, int]](), Counter[tuple[int, int]](), set()
    for kind, key, mb in tasks:
        if kind == "F" and (key[0], mb) in recomputed:
            brief.add(key)
        elif kind in ("F", "R"):
            now[key] += 1
            most[key] = max(most[key], now[key])
        else:
            left[key, mb] -= 1
            now[key] -= not left[key, mb]
    return {key: count + (key in brief) for key, count in most.items()}


class _Moments:
    """Plays one device's order and remembers the fullest moment."""

    def __init__(
        self, static: DeviceMemory, setting: _Setting, primary: int, with_b: set[tuple[int, int]], versions: int
    ) -> None:
        self.static, self.setting, self.primary = static, setting, primary
        self.stages, self.recomputed = setting.stages, setting.recomputed
        self.last = [backward.last for backward in setting.schedule.backwards]
        """Per stage, the kinds of task that end a micro-batch's activations."""
        self.versions = versions
        """Of the weights, that forwards in flight use."""
        self.with_b = with_b
        """(stage, micro-batch) that have a B on this device: its W does not end them if it comes first."""
        # Sums that every task changes a little, kept up to date: there are as many moments as tasks.
        self.activations = self.gradients = self.replica_gradients = self.reducing = self.casts = 0.0
        self.graded: set[tuple[int, int]] = set()
        self.experts_graded: set[tuple[int, int]] = set()
        self.reduced: set[tuple[int, int]] = set()
        self.cast: set[tuple[int, int]] = set()
        self.undo = 0.0
        shown, self.shared = 0.0 if setting.beside_shards else 1.0, [one.shared(setting.again) for one in self.stages]
        parts = [*zip(self.shared, self.stages, strict=True)]
        self.live = LiveShards(
            setting.schedule,
            [shown * (part * stage.weights - stage.narrow) for part, stage in parts],
            [shown * part * stage.gradients for part, stage in parts],
        )
        self._most = 0.0
        self._terms: tuple[float, ...] = (0.0,) * 10

    @property
    def beside(self) -> float:
        """Return what changes beside activations, workspace and messages."""
        held = self.casts + self.gradients + self.replica_gradients + self.reducing + self.undo
        return held + self.live.gathered + self.live.gradients

    def moment(self, workspace: float = 0.0, messages: float = 0.0) -> None:
        """Compare the present moment with the fullest one so far; ``messages`` are those of the running task."""
        changing = self.activations + self.beside + workspace + messages
        if changing > self._most:
            self._most = changing
            self._terms = (
                self.activations,
                self.casts,
                self.gradients,
                self.replica_gradients,
                self.reducing,
                self.undo,
                workspace,
                messages,
                self.live.gathered,
                self.live.gradients,
            )

    @property
    def fullest(self) -> DeviceMemory:
        """The fullest moment so far."""
        (
            activations,
            casts,
            gradients,
            replica_gradients,
            reducing,
            undo,
            workspace,
            messages,
            gathered,
            scattering,
        ) = self._terms
        return replace(
            self.static,
            gradients=gradients,
            replicas=self.static.replicas + replica_gradients,
            activations=activations,
            casts=casts,
            workspace=workspace,
            undo=undo,
            messages=self.static.messages + messages,
            communication=self.static.communication + reducing + scattering,
            gathered=gathered,
        )

    def grade(self, stage: int, replica: int, experts: bool = False) -> None:
        """A stage replica has gradients from now on, or those of ``experts`` that copies do not divide again."""
        key, of = (stage, replica), self.stages[stage]
        if key not in self.graded:
            size, own = self.setting.shares[stage].gradients, (1 - self.shared[stage]) * of.gradients
            size = (own if experts else size) - (own if key in self.experts_graded else 0.0)
            (self.experts_graded if experts else self.graded).add(key)
            if replica == self.primary:
                self.gradients += size
            else:
                self.replica_gradients += size

    def update(self, stage: int, replica: int) -> None:
        """A stage replica is updated after a micro-batch (``stash``), which leaves no gradients."""
        if (stage, replica) not in self.graded:  # frozen
            return
        self.moment()
        # The version that the micro-batch used is gone, unless it is the newest one still.
        self.moment(self.stages[stage].update - (self.stages[stage].weights if self.versions > 1 else 0.0))
        self.graded.discard((stage, replica))
        size = self.setting.shares[stage].gradients
        if replica == self.primary:
            self.gradients -= size
        else:
            self.replica_gradients -= size

    def reduce(self, stage: int, replica: int) -> None:
        """The all-reduce of a stage replica's gradients is under way."""
        if (stage, replica) in self.reduced:
            return
        self.reduced.add((stage, replica))
        if self.setting.schedule.versions != "flush":
            self.reducing += self.stages[stage].reduced
        if not self.setting.schedule.zero_level(stage):  # of divided ones the copy takes the gradients' place
            self.reducing += self.stages[stage].reduced * self.setting.cast_share

    def narrow(self, stage: int, replica: int) -> None:
        """Autocast has made its copies of a stage replica's weights."""
        if self.setting.beside_shards and self.setting.schedule.zero_level(stage) == 3:
            return  # made of the gathered weights
        if (stage, replica) not in self.cast:
            self.cast.add((stage, replica))
            self.casts += self._casts(stage)

    def _casts(self, stage: int) -> float:
        of = self.stages[stage]
        return of.casts - of.narrow if self.setting.schedule.zero_level(stage) == 3 else of.casts * self.versions

    def bookkeeping(self, task: Task) -> None:
        """A task without micro-batches."""
        kind, s, _, replica = task
        if kind in SHARDED:
            if kind == "FREE" and (s, replica) in self.cast:  # made of the gathered weights
                self.cast.discard((s, replica))
                self.casts -= self._casts(s)
            self.moment()
            if kind == "RS":  # from now on this device has its share of the sum
                self.grade(s, replica)
        if kind == "AR":
            self.reduce(s, replica)
            self.moment()

    def play(self, order: Sequence[Task], head: int, undo: float) -> None:
        """Run the tasks of the order; ``undo`` bytes can take the last update back while its first ``head`` tasks run.

        A search plays thousands of orders: what every task changes has local names here, and ``moment`` is asked only
        where one is fuller than all before.
        """
        recomputed, with_b, divided = self.recomputed, self.with_b, self.setting.schedule.sharding is not None
        stashes = self.setting.schedule.versions == "stash"
        slices = self.setting.schedule.rules.slices
        alive: dict[tuple[int, int], float] = {}
        ran: set[tuple[int, int]] = set()  # (stage, micro-batch) whose backward ran and whose B or W is still to come
        self.undo = undo if head > 0 else 0.0
        activations, beside, most = 0.0, self.beside, self._most
        for position, task in enumerate(order):
            kind, s, mbs, replica = task
            stage, level = self.stages[s], self.setting.schedule.zero_level(s) if divided else 0
            if position == head or divided or not mbs:
                self.undo = undo if position < head else 0.0
                self.activations = activations
                if divided:
                    self.live.task(task)
                if not mbs:
                    self.bookkeeping(task)
                beside, most = self.beside, self._most
            if kind in ("F", "R") and (s, replica) not in self.cast:
                self.narrow(s, replica)
                beside = self.beside
            ends = kind in self.last[s]
            for mb in mbs:
                key = (s, mb)
                if kind in ("F", "R"):
                    size = stage.kept
                    if kind == "F" and key in recomputed:
                        size = stage.kept_for_r + (stage.key_gradients if slices > 1 else 0.0)  # and what these are of
                    elif kind == "F" and self.setting.shares_input[s] and (s - 1, mb) not in recomputed:
                        size -= stage.input
                    activations += size - alive.get(key, 0.0)
                    alive[key] = size
                    if activations + beside > most:
                        self.activations = activations
                        self.moment()
                        most = self._most
                    if ends:  # nothing is kept without a backward
                        del alive[key]
                        activations = activations - size if alive else 0.0
                    continue
                if level == 1 and kind in WEIGHT_GRADIENTS:
                    self.grade(s, replica)  # the flat tensor is there before the backward begins
                    beside = self.beside
                if key in ran:
                    ran.discard(key)
                    left = 0.0
                    if level and activations + beside > most:  # with the flat tensor, what W waits for is there still
                        self.activations = activations
                        self.moment()
                        most = self._most
                else:
                    workspace = stage.first_workspace if stashes else stage.workspace
                    if activations + beside + workspace + stage.messages > most:
                        self.activations = activations
                        self.moment(workspace, stage.messages)
                        most = self._most
                    if slices > 1:  # of the slices before this one, whose backwards are still to come
                        waiting, place = (s, -1 - mb // slices), mb % slices
                        activations += stage.key_gradients * place - alive.pop(waiting, 0.0)
                        if place:
                            alive[waiting] = stage.key_gradients * place
                    left = 0.0
                    if not ends or (kind == "W" and key in with_b):
                        # A W that ran the backward leaves B the gradient to send.
                        left = stage.kept_for_w if kind == "B" else stage.input
                        ran.add(key)
                if left:
                    activations += left - alive.get(key, 0.0)
                    alive[key] = left
                else:
                    activations -= alive.pop(key, 0.0)
                    activations = activations if alive else 0.0  # and no rounding goes on
                if kind in WEIGHT_GRADIENTS and (level < 2 or self.shared[s] < 1) and (s, replica) not in self.graded:
                    self.grade(s, replica, experts=level >= 2)
                    beside = self.beside
                if kind in BACKWARD and activations + beside + stage.messages > most:
                    self.activations = activations
                    self.moment(messages=stage.messages)
                    most = self._most
                if stashes and ends:
                    self.activations = activations
                    self.update(s, replica)
                    beside, most = self.beside, self._most
        self.activations = activations
