"""Name devices that turn slow while a run goes on, by how long their tasks take and not by how long they wait.

A stage that is too large is slow always and wherever it runs; a straggler is slower than something it should equal:
its twins (other holders of the same stage), its own tasks before, or what the profile expects of it. ``slowdowns`` says
so of any measured steps, for ``raypipe explain`` and for ``Stragglers``, which follows a run step by step.

Steps on busy hosts vary, and a device must not be named for that. So three things have to be:

- what slows all devices is none of a single one's: each device's time is taken relative to the others' (low median);
- short steps are judged several at a time, for the noise of a moment to even out;
- a device is named once most of the newest such blocks took longer than it ever varied before, by the median absolute
  deviation of its own, and by ``NAMED`` at least.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.profile import Profile
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.online.controller import Event
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.recorded_steps import RecordedStep
from raypipe.plan.plan import Plan
from raypipe.plan.watch import Watch
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import COMPUTE, Kind

STRAGGLES = 1.1
"""A device is a straggler if its tasks take this many times as long as they should: profiles are no more exact."""
NAMED = 1.3
"""It is named while the run goes on from here on: its time has changed by more than a machine's usual noise."""
SPREADS = 3.0
"""Or from so many of its own standard deviations on, where these are more."""
BLOCK_S = 0.15
"""Steps are judged in blocks of at least so long: one step, or several short ones."""
SKIPPED, USUAL, WINDOW, MOST = 3, 12, 12, 9
"""Steps that are skipped while a plan warms up; blocks that say what is usual; the newest blocks that are judged, and
of how many of them it has to be true."""
Key = tuple[int, Kind, int]
"""(device, kind, stage)."""
Expected = Mapping[tuple[Kind, int], float]
"""(kind, stage) -> time of a task with one micro-batch."""


def slowdowns(usual: Mapping[Key, float], planned: Expected, earlier: Expected, devices: int) -> list[float]:
    """Return per device how many times as long as they should its tasks take; 1 for one that is as fast as it should.

    ``usual`` is the measured time of each of its tasks.
    """
    holders: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for (_, kind, stage), seconds in usual.items():
        holders[kind, stage].append(seconds)
    twins = {key: low_median(values) for key, values in holders.items() if len(values) > 1}
    by_twins = _ratios(usual, twins, devices)
    by_itself = _ratios(usual, earlier, devices)
    by_plan = _ratios({key: t for key, t in usual.items() if key[1] in COMPUTE}, planned, devices)
    known = [ratio for ratio in by_plan if ratio is not None]
    scale = low_median(known) if known else 1.0
    result = []
    for twin, own, plan in zip(by_twins, by_itself, by_plan, strict=True):
        most = max(twin or 1.0, own or 1.0, plan / scale if plan is not None and scale > 0 else 1.0)
        result.append(most if most >= STRAGGLES else 1.0)
    return result


def _ratios(usual: Mapping[Key, float], expected: Expected, devices: int) -> list[float | None]:
    """Per device, its usual times over the expected ones; None where nothing is expected."""
    sums = [[0.0, 0.0] for _ in range(devices)]
    for (device, kind, stage), seconds in usual.items():
        if expected.get((kind, stage), 0.0) > 0.0:
            sums[device][0] += seconds
            sums[device][1] += expected[kind, stage]
    return [a / b if b > 0 else None for a, b in sums]


def low_median(values: Iterable[float]) -> float:
    """Return the median; of an even number of values, the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Stragglers:
    """Follows the devices of a run.

    Args:
        slow: devices that are known to be slow, and how many times as long as they should their tasks take.
        alike: whether all devices are of one kind, so that twins should take equally long.
    """

    def __init__(self, slow: Mapping[int, float] | None = None, alike: bool = True) -> None:
        self._alike = alike
        self.slow = dict(slow or {})
        """Per device that is slow now, how many times as long as they should its tasks take."""
        self._schedule: Schedule | None = None
        self._newest: RecordedStep | None = None

    def _begin(self, schedule: Schedule) -> None:
        """Begin with a plan. Nobody knows yet what is usual there, unless devices have the same tasks as before."""
        same = self._schedule is not None and _tasks(schedule) == _tasks(self._schedule)
        self._schedule = schedule
        self._compute = [np.array([t.kind in COMPUTE for t in order], dtype=bool) for order in schedule.orders]
        self._skip = SKIPPED
        self._block: list[NDArray[np.float64]] = []
        self._block_s = 0.0
        if same:
            return
        self._before: list[NDArray[np.float64]] = []
        """Blocks that say what is usual."""
        self._usual: NDArray[np.float64] | None = None
        """Per device, seconds of its tasks in a step, were it as fast as it should be."""
        self._varied = np.zeros(schedule.devices)
        self._window: deque[NDArray[np.float64]] = deque(maxlen=WINDOW)
        """Blocks: per device, how many times as long as usual its tasks took, beside the other devices."""

    def observe(self, clock: StepClock) -> list[Event]:
        """Take in the newest step of a clock; return what has changed."""
        recorded = clock.recorded
        if recorded is None or not recorded.steps or recorded.steps[-1] is self._newest:
            return []
        step = self._newest = recorded.steps[-1]
        if recorded.schedule.devices < 2:
            return []  # nothing to compare with on a host that others use
        if recorded.schedule is not self._schedule:
            self._begin(recorded.schedule)
        if self._skip:
            self._skip -= 1
            return []
        self._block.append(self._work(step))
        self._block_s += max(float(t[-1, 1]) for t in step.times) - min(float(t[0, 0]) for t in step.times)
        if self._block_s < BLOCK_S:
            return []
        block, self._block, self._block_s = np.mean(self._block, axis=0), [], 0.0
        if self._usual is None:
            self._before.append(block)
            return self._learn() if len(self._before) == USUAL else []
        self._window.append(_beside_others(block / self._usual))
        return self._judge() if len(self._window) >= MOST else []

    def _work(self, step: RecordedStep) -> NDArray[np.float64]:
        """Return per device the seconds in which it computed."""
        waits = step.waits
        inside = np.zeros(len(step.times))
        if waits.data_s:
            inside += waits.data_s
        if waits.gather_s:
            inside += [sum(of.values()) for of in waits.gather_s]
        busy = [float((t[c, 1] - t[c, 0]).sum()) for t, c in zip(step.times, self._compute, strict=True)]
        return np.maximum(np.array(busy) - inside, 1e-9)

    def _learn(self) -> list[Event]:
        """Take the first blocks as usual, but for devices that are slow already: known ones, and those beside twins."""
        assert self._schedule is not None
        before = np.array(self._before)
        usual = np.median(before, axis=0)
        known = np.array([self.slow.get(device, 1.0) for device in range(len(usual))])
        ratios = np.array([_beside_others(row / usual) for row in before])
        self._varied = 1.4826 * np.median(abs(ratios - np.median(ratios, axis=0)), axis=0)
        self._usual = usual / known
        held = [tuple(sorted({t.stage for t in order})) for order in self._schedule.orders]
        by_stages: dict[Key, float] = {
            (device, "F", held.index(stages)): float(self._usual[device]) for device, stages in enumerate(held)
        }
        found: list[Event] = []
        if not self._alike:
            return found
        for device, factor in enumerate(slowdowns(by_stages, {}, {}, len(usual))):
            if factor >= max(NAMED, 1.0 + SPREADS * self._varied[device]) and device not in self.slow:
                self._usual[device] /= factor
                found.append(self._changed(device, factor, "its twins"))
        return found

    def _judge(self) -> list[Event]:
        window = np.array(self._window)
        found = []
        for device in range(window.shape[1]):
            now = self.slow.get(device, 1.0)
            least = max(NAMED, 1.0 + SPREADS * self._varied[device])
            ratios = window[:, device] / now
            slower, faster = ratios >= least, ratios <= 1.0 / least
            if slower.sum() >= MOST:
                found.append(self._changed(device, now * float(np.median(ratios[slower])), "itself before"))
            elif now > 1.0 and faster.sum() >= MOST:
                found.append(self._changed(device, now * float(np.median(ratios[faster])), "itself before"))
        if found:
            self._window.clear()
        return found

    def _changed(self, device: int, factor: float, beside: str) -> Event:
        """Note how slow a device is now, and return the event that says so."""
        assert self._schedule is not None
        was = self.slow.pop(device, 1.0)
        factor = factor if factor >= STRAGGLES else 1.0
        if factor > 1.0:
            self.slow[device] = factor
        stages = sorted({t.stage for t in self._schedule.orders[device]})
        said = f"device {device} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
        if factor > 1.0:
            said += f" is slow: its tasks take {factor:.2f} times as long as those of {beside}"
        else:
            said += " is as fast as it should be again"
        return Event(
            "straggler",
            {"device": device, "stages": stages, "slowdown": factor, "was": was, "beside": beside, "message": said},
        )


def _tasks(schedule: Schedule) -> list[Counter[tuple[Kind, int, int]]]:
    """Return per device what it computes in a step, in any order."""
    return [Counter((t.kind, t.stage, len(t.mbs)) for t in order if t.kind in COMPUTE) for order in schedule.orders]


def _beside_others(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return per device how many times as long it took as the others, which count where they are slower than usual."""
    return ratios / max(1.0, low_median(ratios.tolist()))


# Plans for devices of which some have turned slow: another cut, order or schedule over the same devices.


Slow = Mapping[int, float]
"""Number of a device (``cost.hosts.Numbering``) -> how many times as long as they should its tasks take."""


def at_speeds(profile: Profile, speeds: tuple[float, ...]) -> Profile:
    """Return a profile of devices alike, in which device k takes ``speeds[k]`` times as long.

    Each device is a host of its own there, as kinds are known by host. Hosts' links then join all devices: where the
    profile has one host, its inner link does.
    """
    factors = sorted(set(speeds))
    several = len(profile.placed.of_first(len(speeds))) > 1
    links = {} if several else {"between": profile.inside, "collective": None, "host_links": 1}
    alone = profile.model_copy(update={"devices_per_host": 1, "alone": 1.0, **links})

    def kind(factor: float) -> Profile:
        count = speeds.count(factor)
        return alone.at_speed(factor).model_copy(update={"devices": count, "hosts": (1,) * count})

    first, *others = map(kind, factors)
    return first.model_copy(
        update={
            "devices": len(speeds),
            "hosts": (1,) * len(speeds),
            "kind_of_host": tuple(map(factors.index, speeds)) if others else (),
            "other_kinds": tuple(others),
        }
    )


def step_at(job: JobSpec, profile: Profile, plan: Plan, slow: Slow) -> float:
    """Return the seconds of a plan's step on devices of which some are slow.

    Raises:
        ScheduleError: the plan's program cannot run.
    """
    from raypipe.plan.predict.of_plan import PlanPredictor  # what plans, which a run that has no slow device needs not

    numbering = plan.numbering()
    # A profile of several kinds numbers a position's devices in all copies one after another, whatever the plan does.
    numbers = [numbering.number(copy, at) for at in range(numbering.width) for copy in range(numbering.copies)]
    speeds = tuple(slow.get(number, 1.0) for number in numbers)
    return PlanPredictor(job, at_speeds(profile, speeds)).time(plan).step


def choose_at(job: JobSpec, profile: Profile, devices: int, slow: Slow, search_s: float, watch: Watch) -> Plan:
    """Return the fastest plan on all of the devices, of which some are slow.

    Raises:
        SpecError: no plan fits them.
    """
    from raypipe.plan.choose import choose, plan_of

    speeds = tuple(slow.get(number, 1.0) for number in range(devices))
    decision = choose(job, at_speeds(profile, speeds), devices, search_s=search_s, watch=watch)
    on_all = [row.prediction for row in decision.rows if row.group == "ranked"]
    on_all = [p for p in on_all if p.fits and p.candidate.devices == devices]
    if not on_all:
        raise SpecError("plan", f"no plan uses all {devices} devices, of which some are slow", "leave it as it is")
    best = plan_of(min(on_all, key=lambda p: p.step_s), job)
    if best.parallel.replicas > 1 and best.parallel.stages > 1:  # as such a profile numbers devices
        best = best.remade(job.train.batch, innermost="replicas")
        best = best.model_copy(update={"predicted_step_s": min(p.step_s for p in on_all)})
    return best.planned_for(job, profile.device, profile.placed.of_first(devices))
