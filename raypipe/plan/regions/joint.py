"""Multi-region joint scheduling: which weight gradients run on a second stream, beside which region of the step.

How long a step takes on two streams, and how much memory it holds, comes from the measured pairs played out in time.
The main stream runs the backward, the first layer's weight gradient and the next forward. The second one runs the other
weight gradients with their updates, in order, each no sooner than its region begins and its input gradient is there. A
layer's forward waits for its update. While both streams are busy they run at the speeds that the pair was measured
with, else at full speed.

As a plan, every layer is a stage of one device. A weight gradient stands in the order where the second stream may begin
it: behind the last task of the main stream that it waits for. One that runs beside the next step's forward stands at
the end, and ``parallel.side_stream`` says beside which. Of several micro-batches, only the last one's can run there;
those before run beside the next one's forward, where the order has them.

Source: Oh et al. 2022 (OOO backprop), section 4.1, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from raypipe.cost.profile import TakenFor
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.plan.regions.profile import ALONE, MADE_BY, RegionProfile
from raypipe.schedule.ir import Schedule, StageGraph, Task

Assigned = tuple[tuple[int, ...], ...]
"""Per region, the layers whose weight gradients begin in it, in order: S[1..N]."""
NOTHING = 1e-12


@dataclass(frozen=True, slots=True)
class TwoStreams:
    """A step on two streams."""

    step_s: float
    """From the begin of the backward to the end of the next forward."""
    peak_bytes: float
    """Most that activations and waiting weight gradients hold at once."""
    begin: tuple[float, ...]
    """When each region's first task begins."""
    ran: dict[int, tuple[float, float]]
    """Layer -> begin and end of its weight gradient on the second stream."""


@dataclass(frozen=True, slots=True)
class _Main:
    """A task of the main stream."""

    kind: str
    layer: int
    region: int
    seconds: float


def main_tasks(profile: RegionProfile) -> list[_Main]:
    """Return the main stream's tasks, in order."""
    tasks: list[_Main] = []
    last = max(i for i, region in enumerate(profile.regions) if region.kind == "B")
    for number, region in enumerate(profile.regions):
        for layer in region.layers:
            cost = profile.layers[layer]
            tasks.append(_Main(region.kind, layer, number, cost.input_grad if region.kind == "B" else cost.forward))
        if number == last:
            tasks.append(_Main("W", 0, number, profile.layers[0].weight_grad))
    return tasks


def in_turn(profile: RegionProfile) -> TwoStreams:
    """Return the usual step: one stream, each weight gradient right after its input gradient."""
    held = sum(layer.kept_bytes for layer in profile.layers)
    peak, now, begin = held, 0.0, []
    for region in profile.regions:
        begin.append(now)
        for layer in region.layers:
            cost = profile.layers[layer]
            now += cost.input_grad + cost.weight_grad if region.kind == "B" else cost.forward
            if region.kind == "B":
                held += cost.waiting_bytes - cost.kept_bytes
                peak = max(peak, held)
                held -= cost.waiting_bytes
    return TwoStreams(now, peak, tuple(begin), {})


def on_two_streams(profile: RegionProfile, assigned: Assigned) -> TwoStreams:
    """Play a step out.

    Raises:
        ScheduleError: a weight gradient is to begin after a forward that waits for it, or not exactly once.
    """
    tasks, pairs = main_tasks(profile), profile.pairs()
    queue = [(layer, region) for region, layers in enumerate(assigned) for layer in layers]
    if sorted(layer for layer, _ in queue) != list(range(1, len(profile.layers))):
        raise ScheduleError("regions", "not every layer but the first once", "give each one region")
    first = [next(n for n, task in enumerate(tasks) if task.region == r) for r in range(len(profile.regions))]
    back = {task.layer: n for n, task in enumerate(tasks) if task.kind == "B"}
    waits = {layer: {x for x in profile.group(layer) if x} for layer in range(len(profile.layers))}
    now, at, left, work = 0.0, 0, tasks[0].seconds, inf
    ran: dict[int, tuple[float, float]] = {}
    begins: list[float] = []
    begun = 0.0
    while at < len(tasks):
        task = tasks[at]
        blocked = task.kind == "F" and any(x not in ran for x in waits[task.layer])
        if len(begins) == at and not blocked:
            begins.append(now)
        layer, region = queue[0] if queue else (0, 0)
        ready = bool(queue) and at >= first[region] and at > back[layer]
        if blocked and not ready:
            why = f"the forward of layer {task.layer} waits for weight gradients that begin after it"
            raise ScheduleError("regions", why, "put them into an earlier region")
        if ready and work == inf:
            begun, work = now, profile.layers[layer].weight_grad
        rate = ALONE
        if ready and not blocked:
            rate = profile.rates(task.region, layer, pairs[task.region, layer])
        passes = min(inf if blocked else left / rate.main, work / rate.sub if ready else inf)
        now += passes
        if not blocked:
            left -= passes * rate.main
        if ready:
            work -= passes * rate.sub
            if work <= NOTHING:
                ran[layer] = begun, now
                queue.pop(0)
                work = inf
        if not blocked and left <= NOTHING:
            at += 1
            left = tasks[at].seconds if at < len(tasks) else 0.0
    peak = _peak(profile, tasks, begins, [*begins[1:], now], ran)
    return TwoStreams(now, peak, tuple(begins[n] for n in first), ran)


def _peak(
    profile: RegionProfile,
    tasks: Sequence[_Main],
    begins: Sequence[float],
    ends: Sequence[float],
    ran: dict[int, tuple[float, float]],
) -> float:
    """Return the most that is held at the begin of a task, whose own activations count already."""
    kept = [cost.kept_bytes for cost in profile.layers]
    held = sum(kept)  # of the forward before
    peak, waiting = held, dict[int, float]()
    for task, begin, end in zip(tasks, begins, ends, strict=True):
        cost = profile.layers[task.layer]
        waiting = {layer: size for layer, size in waiting.items() if ran.get(layer, (0.0, inf))[1] > begin}
        if task.kind == "F":
            held += cost.kept_bytes
        peak = max(peak, held + sum(waiting.values()))
        if task.kind == "B":
            held -= cost.kept_bytes
            waiting[task.layer] = cost.waiting_bytes
            # At its end both its gradient and what already waited are there.
            alive = sum(size for layer, size in waiting.items() if layer == 0 or ran[layer][1] > end)
            peak = max(peak, held + alive)
        elif task.kind == "W":
            ran = {**ran, 0: (begin, end)}
    return peak


CAP = 1.1
"""Memory that reordering may take, in times the usual step's (the paper's section 7.2)."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A decision of joint scheduling."""

    assigned: Assigned
    """Per region, the layers whose weight gradients begin in it; layer 0's stays on the main stream."""
    eager: int
    """Regions at the begin of the backward whose weight gradients run as soon as they can, to save memory."""
    usual: TwoStreams
    """The step on one stream."""
    found: TwoStreams
    """The step on two."""

    @property
    def gains(self) -> bool:
        """Return whether the second stream pays, by the profile."""
        return self.found.step_s < self.usual.step_s


def joint_schedule(profile: RegionProfile, cap: float = CAP) -> Joint:
    """Decide where weight gradients run, within memory.

    With pre-scheduling, weight gradients of the first k regions run as soon as they can, and the algorithm decides
    about the rest. The paper takes the smallest k whose memory fits; here all are tried, and the fastest that fits
    counts.

    Args:
        profile: the measured regions.
        cap: largest peak memory, in times the usual step's.

    Raises:
        ScheduleError: not even with all weight gradients as early as they can be, a step stays below ``cap``.
    """
    usual = in_turn(profile)
    backward = sum(region.kind == "B" for region in profile.regions)
    tried = []
    for eager in range(backward + 1):
        assigned = assign(profile, eager)
        tried.append(Joint(assigned, eager, usual, on_two_streams(profile, assigned)))
    fits = [one for one in tried if one.found.peak_bytes <= cap * usual.peak_bytes]
    if fits:
        return min(fits, key=lambda one: one.found.step_s)
    least = min(one.found.peak_bytes for one in tried)
    over = least / usual.peak_bytes
    raise ScheduleError(
        "regions",
        f"the second stream takes at least {over:.2f} times the memory of one, and {cap:g} is allowed",
        f"allow {over:.2f} (--memory), or leave parallel.side_stream out",
    )


class _FreeMoments:
    """When main-stream tasks begin and end with nothing beside them."""

    def __init__(self, profile: RegionProfile) -> None:
        self.region = [0.0] * len(profile.regions)
        self.ready = [0.0] * len(profile.layers)
        """Per layer, the end of its input gradient."""
        self.forward = [0.0] * len(profile.layers)
        """Per layer, the begin of its next forward."""
        now, seen = 0.0, -1
        for task in main_tasks(profile):
            if task.region != seen:
                seen = task.region
                self.region[seen] = now
            if task.kind == "F":
                self.forward[task.layer] = now
            now += task.seconds
            if task.kind == "B":
                self.ready[task.layer] = now
        self.due = [min(self.forward[x] for x in profile.group(n)) for n in range(len(profile.layers))]
        """Per layer, when its weight gradient must have ended."""


def assign(profile: RegionProfile, eager: int = 0) -> Assigned:
    """Return S[1..N] of Algorithm 1, with pre-scheduling of the first ``eager`` regions.

    In each round, every region that has time left names the weight gradient that gains most in it, of those that can
    begin next there: their input gradient is there first, before the region's main kernels end, and they end before
    their layer's next forward. The region whose pair gains most gets it. What no region has room for ends the backward.
    """
    at, pairs = _FreeMoments(profile), profile.pairs()
    count = len(profile.regions)
    result: list[list[int]] = [[] for _ in range(count)]
    now = [0.0] * count
    """Per region, how long its second stream is taken."""
    left = set(range(1, len(profile.layers)))
    for region in range(eager):
        for layer in profile.regions[region].layers:
            if layer in left:
                left.remove(layer)
                result[region].append(layer)
                began = max(now[region], at.ready[layer] - at.region[region])
                now[region] = began + pairs[region, layer].sub_s
        over = now[region] - profile.main_s(region)
        if over > 0 and region + 1 < count:  # the next region's second stream is still busy with it
            now[region + 1] = over
    open_ = {region for region in range(eager, count) if now[region] < profile.main_s(region)}
    while left:
        best: tuple[float, int, int, float] | None = None
        for region in sorted(open_):
            could = []
            for layer in sorted(left, reverse=True):
                began = max(now[region], at.ready[layer] - at.region[region])
                ends = began + pairs[region, layer].sub_s
                if began < profile.main_s(region) and at.region[region] + ends <= at.due[layer]:
                    could.append((began, layer, ends))
            first = min((began for began, _, _ in could), default=0.0)  # others would keep the stream waiting
            for began, layer, ends in could:
                gain = profile.speed_up(region, layer, pairs[region, layer])
                if began == first and (best is None or gain > best[0]):
                    best = gain, region, layer, ends
        if best is None:
            break
        _, region, layer, now[region] = best
        result[region].append(layer)
        left.remove(layer)
        if now[region] >= profile.main_s(region):
            open_.remove(region)
    last = max(r for r, region in enumerate(profile.regions) if region.kind == "B")
    result[last] += sorted(left, key=lambda layer: (at.due[layer], layer))
    return tuple(map(tuple, result))


NAME = "multi-region"


def held_until(profile: RegionProfile, joint: Joint) -> dict[int, int]:
    """Return, of layers whose weight gradient runs in the next forward, the first layer of its region there."""
    return {
        layer: profile.regions[region].layers[0]
        for region, layers in enumerate(joint.assigned)
        if profile.regions[region].kind == "F"
        for layer in layers
    }


def order_of(profile: RegionProfile, joint: Joint, microbatches: int) -> Schedule:
    """Return one step of all micro-batches on one device."""
    count = len(profile.layers)
    held = held_until(profile, joint)
    order: list[Task] = []
    for mb in range(microbatches):
        before = (mb - 1,)
        for layer in range(count):
            if mb:
                order += [Task("W", late, before) for late, begin in held.items() if begin == layer]
            order.append(Task("F", layer, (mb,)))
        for region, layers in zip(profile.regions, joint.assigned, strict=True):
            if region.kind == "F":
                continue
            waiting = list(layers)
            done: set[int] = {layer for layer in range(count) if layer > max(region.layers)}
            for layer in region.layers:
                while waiting and waiting[0] in done:
                    order.append(Task("W", waiting.pop(0), (mb,)))
                order.append(Task("B", layer, (mb,)))
                done.add(layer)
            order += [Task("W", late, (mb,)) for late in waiting]
        order.append(Task("W", 0, (mb,)))
    order += [Task("W", late, (microbatches - 1,)) for late in held]
    return Schedule(
        name=NAME,
        placement=((0,) * count,),
        orders=(tuple(order),),
        microbatches=microbatches,
        graph=StageGraph.chain(count),
    )


def check_same(job: JobSpec, profile: RegionProfile, source: str) -> None:
    """Check that a profile was measured for a job's model.

    Raises:
        SpecError: it was measured for another.
    """
    if profile.taken_for is not None and profile.taken_for.model != TakenFor.job(job).model:
        raise SpecError(source, "was measured for another model", f"measure again: {MADE_BY}")


def plan_of(job: JobSpec, profile: RegionProfile, joint: Joint) -> Plan:
    """Return the plan that ``raypipe train --plan`` runs; on one stream, where a second one does not pay.

    Raises:
        SpecError: the mini-batch is no multiple of the micro-batch that was measured, or the job clips.
    """
    microbatches, rest = divmod(job.train.batch, profile.microbatch)
    if rest:
        raise SpecError(
            "train.batch",
            f"{job.train.batch} is no multiple of the measured micro-batch of {profile.microbatch}",
            "measure again, or use another batch",
        )
    cut = tuple((n,) for n in range(len(profile.layers)))
    transport = job.parallel.transport
    if not joint.gains:
        parallel = ParallelSpec(schedule="1f1b", microbatch=profile.microbatch, transport=transport)
        whole = tuple(range(len(profile.layers)))
        plan, step_s = Plan.of(parallel, (whole,), job.train.batch), joint.usual.step_s
        return plan.model_copy(update={"predicted_step_s": step_s * microbatches})
    if job.train.clip is not None:
        raise SpecError(
            "train.clip",
            "with a second stream, layers are updated before the norm of all gradients is known",
            "set train.clip to null",
        )
    parallel = ParallelSpec(
        schedule="auto",
        placement="free",
        chunks=len(profile.layers),
        microbatch=profile.microbatch,
        replan=False,
        side_stream=held_until(profile, joint),
        transport=transport,
    )
    plan = Plan.of(parallel, cut, job.train.batch, order_of(profile, joint, microbatches))
    return plan.model_copy(update={"predicted_step_s": joint.found.step_s * microbatches})
