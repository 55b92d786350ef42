"""Multi-region joint scheduling: which weight gradients run on a second stream, beside which region of the step.

Source: Oh et al. 2022 (OOO backprop), section 4.1, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.plan.regions.profile import RegionProfile
from raypipe.plan.regions.timing import Assigned, TwoStreams, in_turn, main_tasks, on_two_streams

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
    found: list[list[int]] = [[] for _ in range(count)]
    now = [0.0] * count
    """Per region, how long its second stream is taken."""
    left = set(range(1, len(profile.layers)))
    for region in range(eager):
        for layer in profile.regions[region].layers:
            if layer in left:
                left.remove(layer)
                found[region].append(layer)
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
        found[region].append(layer)
        left.remove(layer)
        if now[region] >= profile.main_s(region):
            open_.remove(region)
    last = max(r for r, region in enumerate(profile.regions) if region.kind == "B")
    found[last] += sorted(left, key=lambda layer: (at.due[layer], layer))
    return tuple(map(tuple, found))
