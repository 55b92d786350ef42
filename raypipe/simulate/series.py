"""Several steps one after another, message by message, as the program runner walks them.

``simulate`` and ``period`` take messages to have a latency and no more. Here a directed link also carries one message
at a time, which matters where a message takes longer than a task; and every step has its own end, so that a short run
can be held against it, with its fill and its drain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Hashable
from dataclasses import dataclass, field

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import WHOLE, Part, parts
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.programs import Message, Program, step_programs
from raypipe.simulate.period import period


def series(
    schedule: Schedule, costs: CostTable, steps: int, occupancy: float = 0.0, norm: NormPolicy = "none"
) -> tuple[float, ...]:
    """When each of ``steps`` steps ends, counted from the start of the first, in the cost table's unit.

    Args:
        schedule: with its gradient sums and updates.
        costs: ``comm`` is a message's latency beside ``occupancy``.
        steps: how many.
        occupancy: time that a message keeps its link for itself; the next one from the same device to the same
            device begins after it.
        norm: what updates have to do with the global gradient norm (``schedule.lowering.norm_policy``).

    Raises:
        ScheduleError: the schedule cannot run.
    """
    ways = parts(schedule)
    durations = {part: [costs.durations(one, list(order)) for order in one.orders] for part, one in ways.items()}
    order = [WHOLE if schedule.versions == "flush" else (k == 0, k == steps - 1) for k in range(steps)]
    world = _World(schedule, costs, occupancy, norm, order, step_programs(schedule, norm == "optimistic"), durations)
    world.run()
    return tuple(world.ends)


SETTLED = 24
"""Steps after which a run of steps has its steady rate."""


def steady(schedule: Schedule, costs: CostTable, occupancy: float = 0.0, norm: NormPolicy = "none") -> float:
    """Time per step in the long run, in the cost table's unit; arguments as ``series``.

    ``period``, where that says it all; else, for links that carry one message at a time and for the updates of
    asynchronous steps, the mean of many steps.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    if schedule.versions == "flush" and not occupancy:
        return period(schedule, costs, norm=norm)
    ends = series(schedule, costs, 2 * SETTLED + 1, occupancy, norm)  # the last one drains
    return (ends[-2] - ends[SETTLED - 1]) / SETTLED


Waits = Generator[Hashable, None, None]
"""A device: yields what it waits for."""


@dataclass(slots=True)
class _World:
    schedule: Schedule
    costs: CostTable
    occupancy: float
    norm: NormPolicy
    order: list[Part]
    programs: dict[Part, list[Program]]
    durations: dict[Part, list[list[float]]]
    known: dict[Hashable, float] = field(default_factory=dict)
    """When something came about: the arrival of a message, the end of an all-reduce, a norm."""
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)
    lane_free: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Per device, the end of its newest all-reduce: they run one after another."""
    joined: dict[Hashable, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """All-reduce or norm -> (device, when it joined)."""
    news: list[Hashable] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def run(self) -> None:
        self.ends = [0.0] * len(self.order)
        waiting: dict[Hashable, list[Waits]] = {}
        awake = [self._device(d) for d in range(self.schedule.devices)]
        left = len(awake)
        while awake:
            device = awake.pop()
            missing = next(device, self)
            if missing is self:
                left -= 1
            else:
                waiting.setdefault(missing, []).append(device)
            while self.news:
                awake += waiting.pop(self.news.pop(), [])
        if left:
            raise ScheduleError(self.schedule.name, f"{left} devices wait for ever", "verify the schedule")

    def _device(self, d: int) -> Waits:
        """Walk one device's programs as ``runtime.runner`` does."""
        now = 0.0
        for step, part in enumerate(self.order):
            program = self.programs[part][d]
            sums: list[Hashable] = []
            updates = False
            settled = self.norm != "optimistic" or step == 0
            for position, (action, duration) in enumerate(zip(program.actions, self.durations[part][d], strict=True)):
                if not settled and program.ahead is not None and position >= program.ahead.tasks:
                    settled = True
                    now = max(now, (yield from self._await(("norm", step - 1, d))))
                for message in action.receives:
                    if not message.local:
                        now = max(now, (yield from self._await(self._key(message, step))))
                task = action.task
                if task.kind == "AR":
                    sums.append(self._join_sum(task.stage, step, d, now, duration))
                    continue
                if task.kind == "U" and not updates:
                    updates = True
                    for one in sums:
                        now = max(now, (yield from self._await(one)))
                    if self.norm != "none":
                        self._join_norm(step, d, now)
                    if self.norm == "wait":
                        now = max(now, (yield from self._await(("norm", step, d))))
                now += duration
                for message in action.sends:
                    if not message.local:
                        self._send(message, step, now)
            for one in sums:
                now = max(now, (yield from self._await(one)))
            self.ends[step] = max(self.ends[step], now)

    def _await(self, what: Hashable) -> Generator[Hashable, None, float]:
        while what not in self.known:
            yield what
        return self.known[what]

    def _tell(self, what: Hashable, when: float) -> None:
        self.known[what] = when
        self.news.append(what)

    def _key(self, m: Message, step: int) -> Hashable:
        return (m.direction, m.src_stage, m.dst_stage, step * self.schedule.microbatches + m.mb)

    def _send(self, m: Message, step: int, now: float) -> None:
        edge = (m.src_device, m.dst_device)
        self.link_free[edge] = max(now, self.link_free.get(edge, 0.0)) + self.occupancy
        self._tell(self._key(m, step), self.link_free[edge] + self.costs.latency(m.src_stage, m.dst_stage))

    def _join_sum(self, stage: int, step: int, d: int, now: float, duration: float) -> Hashable:
        what = ("sum", stage, step)
        here = self.joined[what]
        here.append((d, now))
        if len(here) == self.schedule.replicas:
            end = max(max(at, self.lane_free[e]) for e, at in here) + duration
            for e, _ in here:
                self.lane_free[e] = end
            self._tell(what, end)
        return what

    def _join_norm(self, step: int, d: int, now: float) -> None:
        here = self.joined["norm", step]
        here.append((d, now))
        if len(here) == self.schedule.devices:
            lag = max(self.costs.links, default=0.0) + self.occupancy
            for own, _ in here:
                self._tell(("norm", step, own), max(at + (lag if e != own else 0.0) for e, at in here))
