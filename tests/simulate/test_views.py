"""Every view of the clock against an event-driven simulation that knows none of it, on random schedules and costs.

``happens`` lets devices, links and networks act as time passes, after the definitions in ``schedule.ir``: nothing here
uses the dependency rule, the task graph, the walk or the lowered messages. All times are whole numbers, so that sums
are exact and the views must agree to the last bit.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.step_time import StepOverheads, step_time
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.lowering.asynchronous import parts
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import Shape
from raypipe.search import search
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from raypipe.simulate.series import series
from raypipe.simulate.timeline import critical_path
from tests.schedule.test_properties import schedules

Times = dict[tuple[int, int, int], tuple[float, float]]
"""(step, device, position in its order) -> start, end."""


class World:
    """Devices that run their orders, links that carry messages, networks that all-reduce; time passes by events."""

    def __init__(
        self, schedule: Schedule, costs: CostTable, steps: int, occupancy: float, norm: NormPolicy, runner: bool
    ) -> None:
        self.s, self.costs, self.occupancy, self.norm, self.runner = schedule, costs, occupancy, norm, runner
        flush, n = schedule.versions == "flush", schedule.microbatches
        self.rows: list[list[tuple[int, int, Task]]] = [[] for _ in schedule.orders]  # step, position, task
        for k in range(steps):
            part = (True, True) if flush else (k == 0, k == steps - 1)
            for row, order in zip(self.rows, parts(schedule)[part].orders, strict=True):
                row += [(k, i, t._replace(mbs=tuple(m + k * n for m in t.mbs))) for i, t in enumerate(order)]
        self.recomputed = {(t.stage, m) for row in self.rows for _, _, t in row if t.kind == "R" for m in t.mbs}
        self.heads = heads(schedule)
        self.now, self.events = 0.0, [0.0]
        self.expected = set(self.events)  # each time once: what waits asks at every event, which would multiply them
        self.at = [0] * schedule.devices
        self.busy, self.network_busy = [0.0] * schedule.devices, [0.0] * schedule.devices
        self.known: dict[tuple, float] = {}  # (what, stage, micro-batch, device[, for which stage]) -> when it is there
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.queue: list[list[tuple[int, int, Task]]] = [[] for _ in schedule.orders]  # all-reduces issued
        self.running: list[tuple[float, int, int, int, Task]] = []
        self.times: Times = {}

    def run(self) -> Times:
        while self.events:
            self.expected.remove(time := heapq.heappop(self.events))
            self.now = max(self.now, time)
            while self.finish() or self.reduce() or any([self.start(d) for d in range(self.s.devices)]):
                pass
        assert self.at == [len(row) for row in self.rows]
        assert not any(self.queue)
        return self.times

    def later(self, time: float) -> None:
        if time not in self.expected:
            self.expected.add(time)
            heapq.heappush(self.events, time)

    def has(self, *fact: object) -> bool:
        return self.known.get(fact, float("inf")) <= self.now

    def learn(self, time: float, *fact: object) -> None:
        self.known[fact] = time
        self.later(time)

    def begin(self, d: int, step: int, position: int, task: Task) -> float:
        flush = self.s.versions == "flush"
        end = self.now + self.costs.durations(self.s, [self.s.orders[d][position] if flush else task])[0]
        self.times[step, d, position] = (self.now, end)
        self.running.append((end, step, d, position, task))
        self.later(end)
        return end

    def finish(self) -> bool:
        """What ends now is known on its device; other devices learn of it by a message."""
        over = sorted(r for r in self.running if r[0] <= self.now)
        self.running = [r for r in self.running if r[0] > self.now]
        for _, step, d, position, task in over:
            if not task.mbs:
                self.learn(self.now, task.kind, task.stage, task.replica, step, d, position)
            for m in task.mbs:
                for what in {"BW": ("B", "W")}.get(task.kind, (task.kind,)):
                    self.learn(self.now, what, task.stage, m, d)
                for a, b in self.s.graph.edges:
                    if task.stage == (a if task.kind == "F" else b) and task.kind in ("F", "B", "BW"):
                        self.send(d, "F" if task.kind == "F" else "B", task, b if task.kind == "F" else a, m)
        return bool(over)

    def send(self, d: int, what: str, task: Task, to: int, m: int) -> None:
        other = self.s.placement[task.replica][to]
        if other != d:
            self.link_free[d, other] = max(self.now, self.link_free[d, other]) + self.occupancy
            wide = self.costs.links[min(task.stage, to) : max(task.stage, to)]
            self.learn(self.link_free[d, other] + max(wide), what, task.stage, m, other, to)

    def start(self, d: int) -> bool:
        if self.at[d] == len(self.rows[d]) or self.busy[d] > self.now:
            return False
        step, position, task = self.rows[d][self.at[d]]
        following = self.rows[d][self.at[d] + 1 : self.at[d] + 2]
        if self.s.joined and task.mbs and following and self.s.orders[d][following[0][1]] in self.s.joined:
            group = [self.rows[d][self.at[d]], *following]
            if not all([self.may(d, *one) for one in group]):
                return False
            self.at[d] += 2
            self.busy[d] = max([self.begin(d, *one) for one in group])
            return True
        if not self.may(d, step, position, task):
            return False
        self.at[d] += 1
        if task.kind == "AR":
            self.queue[d].append((step, position, task))
        else:
            self.busy[d] = self.begin(d, step, position, task)
        return True

    def may(self, d: int, step: int, position: int, task: Task) -> bool:
        inputs = [a for a, b in self.s.graph.edges if b == task.stage]
        outputs = [b for a, b in self.s.graph.edges if a == task.stage]
        late = self.s.rules.recompute == "late"
        for m in task.mbs:
            own = self.has("R" if (task.stage, m) in self.recomputed else "F", task.stage, m, d)
            gradient = all(self.has("B", b, m, d) or self.has("B", b, m, d, task.stage) for b in outputs)
            if not {
                "F": all(self.has("F", a, m, d) or self.has("F", a, m, d, task.stage) for a in inputs),
                "R": self.has("F", task.stage, m, d) and (gradient or not late),
                "B": own and gradient, "BW": own and gradient,
                "W": own and gradient if self.s.rules.w_dep == "grad" else self.has("B", task.stage, m, d),
            }[task.kind]:  # fmt: skip
                return False
        if task.kind == "F" and step and self.s.versions == "flush" and not self.weights(step - 1, task):
            return False
        updates = [i for k, i, t in self.rows[d] if k == step and t.kind == "U"]
        if task.kind == "U" and self.s.versions != "stash":
            first = position == updates[0]
            if not all(
                self.ended(x) for x in self.reductions(step, d) if (first and self.runner) or x[2][1:] == task[1:]
            ):
                return False
            if first and self.norm == "wait" and not self.norm_known(step, d):
                return False
        head = next((i for k, i, t in self.rows[d] if k == step and self.beyond_head(step, d, i, t)), None)
        return not (self.norm == "optimistic" and step and position == head and not self.norm_known(step - 1, d))

    def beyond_head(self, step: int, d: int, position: int, task: Task) -> bool:
        if self.s.versions == "2bw":
            return not task.mbs or (task.kind == "F" and task.mbs[0] >= (step + 1) * self.s.microbatches)
        return position >= self.heads[d]

    def weights(self, step: int, task: Task) -> bool:
        """The update of a stage has been made, else its all-reduce, else every gradient of it is there."""
        rows = [(k, d, i, t) for d, row in enumerate(self.rows) for k, i, t in row if k == step and t[1] == task[1]]
        for kind in ("U", "AR"):
            own = [(k, d, t, i) for k, d, i, t in rows if t.kind == kind and t.replica == task.replica]
            if own:
                return all(self.ended(x) for x in own)
        return all(self.has("W", t.stage, m, d) for _, d, _, t in rows if t.kind in ("W", "BW") for m in t.mbs)

    def ended(self, what: tuple[int, int, Task, int]) -> bool:
        step, d, task, position = what
        return self.has(task.kind, task.stage, task.replica, step, d, position)

    def reductions(self, step: int, d: int) -> list[tuple[int, int, Task, int]]:
        return [(step, d, t, i) for k, i, t in self.rows[d] if k == step and t.kind == "AR"]

    def norm_known(self, step: int, d: int) -> bool:
        """Every gradient is complete, and other devices have had time to say so."""
        lag = max(self.costs.links) + self.occupancy
        for e, row in enumerate(self.rows):
            for k, i, t in row:
                if k == step and t.kind != "U":
                    end = self.times.get((k, e, i), (0.0, float("inf")))[1]
                    if end + lag * (e != d) > self.now:
                        if end < float("inf"):
                            self.later(end + lag)
                        return False
        return True

    def reduce(self) -> bool:
        """Start a collective that is next on the free networks of all its holders."""
        for step, _, task in {q[0] for q in self.queue if q}:
            ready = True
            holders = [placement[task.stage] for placement in self.s.placement]
            for d in set(holders):
                front = self.queue[d][: holders.count(d)]
                mine = len(front) == holders.count(d) and all(k == step and t.stage == task.stage for k, _, t in front)
                ready = ready and mine and self.network_busy[d] <= self.now and self.busy_before(d, front)
            if ready:
                for d in set(holders):
                    for k, i, t in self.queue[d][: holders.count(d)]:
                        self.network_busy[d] = self.begin(d, k, i, t)
                    del self.queue[d][: holders.count(d)]
                return True
        return False

    def busy_before(self, d: int, front: list[tuple[int, int, Task]]) -> bool:
        """The compute task before the all-reduce has ended: that is when it is issued."""
        return all(
            self.times.get((k, d, j), (0, float("inf")))[1] <= self.now
            for step, position, _ in front for k, j, t in self.rows[d]
            if t.kind != "AR" and (k, j) < (step, position)
        )  # fmt: skip


def happens(
    schedule: Schedule, costs: CostTable, steps: int = 1, occupancy: float = 0.0, norm: NormPolicy = "none",
    runner: bool = False,
) -> Times:  # fmt: skip
    """Start and end of everything; ``runner``: a device waits for all its all-reduces before its first update."""
    return World(schedule, costs, steps, occupancy, norm, runner).run()


def heads(schedule: Schedule) -> list[int]:
    """Forwards at the head of each order, as far as they need only each other."""
    counts = [next((i for i, t in enumerate(o) if t.kind != "F"), len(o)) for o in schedule.orders]
    while True:
        ran = {(t.stage, m) for o, c in zip(schedule.orders, counts, strict=True) for t in o[:c] for m in t.mbs}
        shorter = []
        for o, c in zip(schedule.orders, counts, strict=True):
            fed = [all((a, m) in ran for a, b in schedule.graph.edges if b == t.stage for m in t.mbs) for t in o[:c]]
            shorter.append(fed.index(False) if False in fed else c)
        if shorter == counts:
            return counts
        counts = shorter


def step_ends(times: Times, steps: int) -> tuple[float, ...]:
    return tuple(max((end for (k, _, _), (_, end) in times.items() if k == step), default=0.0) for step in range(steps))


@st.composite
def tables(draw: st.DrawFn, stages: int) -> CostTable:
    row = lambda least: tuple(float(draw(st.integers(least, 5))) for _ in range(stages))  # noqa: E731
    comm = draw(st.sampled_from([0.0, 2.0])) if draw(st.booleans()) else row(0)
    return CostTable(
        forward=row(0), input_grad=row(0), weight_grad=row(0), recompute=row(0), all_reduce=row(0), update=row(0),
        comm=comm,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_pairs_start_when_both_halves_can(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(["dualpipe", "dualpipev", "interleaved-overlap"])
    depth = draw.choice([2, 4])
    bare = generate(name, Shape(devices=depth, microbatches=2 * depth + 2 * draw.randrange(3)))
    row = lambda least, most: tuple(float(draw.randint(least, most)) for _ in range(bare.stages))  # noqa: E731
    costs = CostTable(
        forward=row(4, 9), input_grad=row(4, 9), weight_grad=row(0, 9), recompute=row(0, 9), all_reduce=row(0, 9),
        update=row(0, 9), comm=row(0, 3), dispatch=row(0, 2), combine=row(0, 2), overlap=draw.choice([0.0, 0.5, 1.0]),
    )  # fmt: skip
    whole = add_updates(place_gradient_sync(bare, "eager"))
    assert whole.joined == bare.joined
    times = happens(whole, costs)
    position = {t: (0, d, i) for d, order in enumerate(whole.orders) for i, t in enumerate(order)}
    timeline = simulate(whole, costs)
    assert {position[s.task]: (s.start, s.end) for row in timeline.spans for s in row} == times
    assert series(whole, costs, 3, 1.0) == step_ends(happens(whole, costs, 3, 1.0, runner=True), 3)
    ends = step_ends(happens(whole, costs, STEPS), STEPS)
    assert period(whole, costs) == pytest.approx((ends[-1] - ends[-13]) / 12, rel=0.01)
    path = critical_path(timeline).spans
    assert (path[0].start, path[-1].end) == (0, timeline.makespan)
    assert all(a.end <= b.start for a, b in itertools.pairwise(path))


SYNCS = st.sampled_from(["lazy", "eager", "eager-opt"])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(schedules(), SYNCS, st.data())
def test_one_step(schedule: Schedule, sync: Sync, data: st.DataObject) -> None:
    """Every start and every end, and the step with its gradient sums as the planner times it."""
    costs = data.draw(tables(schedule.stages))
    whole = add_updates(place_gradient_sync(schedule, sync))
    times = happens(whole, costs)
    position = {t: (0, d, i) for d, order in enumerate(whole.orders) for i, t in enumerate(order)}
    spans = [s for row in simulate(whole, costs).spans for s in row]
    assert {position[s.task]: (s.start, s.end) for s in spans} == times
    copies = data.draw(st.integers(1, 2))
    bare, summed = (
        max(step_ends(happens(s, costs), 1))
        for s in (schedule, place_gradient_sync(replicate(schedule, copies), sync))
    )  # fmt: skip
    updates = [0.0] * schedule.devices
    for row in schedule.placement:
        for stage, d in enumerate(row):
            updates[d] += costs.update[stage]
    result = step_time(Order(schedule), costs, sync, StepOverheads(copies=copies, norm="wait", norm_s=3.0))
    assert (result.step, result.compute) == (summed + 3.0 + max(updates), bare)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(schedules(), SYNCS, st.sampled_from(["none", "wait", "optimistic"]), st.sampled_from([0.0, 1.0, 4.0]), st.data())
def test_several_steps(schedule: Schedule, sync: Sync, norm: NormPolicy, occupancy: float, data: st.DataObject) -> None:
    costs = data.draw(tables(schedule.stages))
    whole = add_updates(place_gradient_sync(schedule, sync))
    if not all(order and order[-1].kind == "U" for order in whole.orders):
        norm = "none"  # a device without a stage has no gradients to wait for
    expected = step_ends(happens(whole, costs, 3, occupancy, norm, runner=True), 3)
    assert series(whole, costs, 3, occupancy, norm) == expected


def test_a_copy_without_micro_batches_sums_at_the_head_and_waits_there_for_the_norm() -> None:
    """Its all-reduce comes first, where the device stops until the norm of the step before is known."""
    orders = [[Task(kind, stage, (0,), 1) for kind in ("F", "BW")] for stage in (0, 1)]  # type: ignore[arg-type]
    whole = add_updates(place_gradient_sync(Schedule.of_chain("one", [(0, 0), (0, 1)], orders, 1), "eager"))
    assert whole.orders[0][0].kind == "AR"
    free = (0.0, 0.0)
    costs = CostTable(
        forward=free, input_grad=free, weight_grad=free, recompute=free, all_reduce=(0.0, 3.0), update=free, comm=2.0
    )
    expected = step_ends(happens(whole, costs, 3, 0.0, "optimistic", runner=True), 3)
    assert series(whole, costs, 3, 0.0, "optimistic") == expected
    unlimited = step_ends(happens(whole, costs, 3, 0.0, "none", runner=True), 3)
    assert expected[-1] > unlimited[-1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["pipedream", "pipedream-2bw"]), st.integers(2, 4), st.integers(0, 3),
    st.sampled_from([0.0, 3.0]), st.sampled_from(["none", "optimistic"]), st.data(),
)  # fmt: skip
def test_several_asynchronous_steps(
    name: str, devices: int, more: int, occupancy: float, norm: NormPolicy, data: st.DataObject
) -> None:
    costs = data.draw(tables(devices))
    schedule = generate(name, Shape(devices=devices, microbatches=devices + more))
    if name == "pipedream":
        norm = "none"
    else:
        schedule = replicate(schedule, data.draw(st.integers(1, 2)))
    expected = step_ends(happens(schedule, costs, 4, occupancy, norm, runner=True), 4)
    assert series(schedule, costs, 4, occupancy, norm) == expected


STEPS, LONGEST = 36, 6


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(schedules(), SYNCS, st.sampled_from(["none", "wait", "optimistic"]), st.data())
def test_the_steady_state(schedule: Schedule, sync: Sync, norm: NormPolicy, data: st.DataObject) -> None:
    """Where the last steps repeat each other, the period is exactly what they take."""
    costs = data.draw(tables(schedule.stages))
    whole = schedule if data.draw(st.booleans()) else place_gradient_sync(schedule, sync)
    whole = whole if data.draw(st.booleans()) else add_updates(whole)  # weights are new after U, else AR, else W
    if not all(order and order[-1].kind == "U" for order in whole.orders):
        norm = "none"
    ends = step_ends(happens(whole, costs, STEPS, norm=norm), STEPS)
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    turn = next(
        (k for k in range(1, LONGEST) if gaps[-2 * k :] == 2 * gaps[-k:] and gaps[-4 * k :] == 4 * gaps[-k:]), 0
    )
    expected = sum(gaps[-turn:]) / turn if turn else sum(gaps[STEPS // 2 :]) / len(gaps[STEPS // 2 :])
    assert period(whole, costs, norm=norm) == pytest.approx(expected, rel=1e-9 if turn else 0.05)


@pytest.mark.parametrize("seed", range(6))
def test_a_skip_connection_is_as_slow_as_the_slowest_link_it_crosses(seed: int) -> None:
    """Stage 0 is with stage 1, and stage 2 elsewhere: the message that skips stage 1 may be the later one."""
    rng = random.Random(seed)
    graph = StageGraph(5, ((0, 1), (1, 2), (0, 2), (2, 3), (1, 4), (3, 4)))
    links = tuple(float(rng.randint(0, 9)) for _ in range(5))
    costs = CostTable.even(5, comm=links)
    result = search(((0, 0, 2, 1, 0),), 3, costs, graph=graph, budget_s=0.05)
    position = {t: (0, d, i) for d, order in enumerate(result.schedule.orders) for i, t in enumerate(order)}
    timeline = simulate(result.schedule, costs)
    times = {position[s.task]: (s.start, s.end) for row in timeline.spans for s in row}
    assert times == happens(result.schedule, costs)
    assert result.bound <= result.value == timeline.makespan


def test_latencies_are_normalised() -> None:
    assert CostTable.even(4, comm=(1.0, 2.0, 3.0)).links == (1, 2, 3, 3)
    assert CostTable.even(4, comm=(2.0, 2.0, 2.0)) == CostTable.even(4, comm=2.0)
    assert CostTable.even(1, comm=()).comm == 0
    for wrong in ((1.0,), (1.0,) * 5, (1.0, float("inf"), 0.0)):
        with pytest.raises(ScheduleError, match="comm"):
            CostTable.even(4, comm=wrong)
