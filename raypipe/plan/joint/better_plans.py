"""Plans whose cut, placement and order were searched together, from the best plans that the planner has.

It is never worse than these: only a plan that is predicted, whole and within memory, to be faster is returned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from raypipe.cost.kinds import room_bytes
from raypipe.cost.memory import StageMemory, parameter_bytes, stage_memory
from raypipe.errors import ScheduleError
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.of_plan import Certifier, Certifiers, waits_for_all
from raypipe.plan.joint.annealing import BORDERS, SHORTEN, Hints, arranged
from raypipe.plan.joint.arrangement import Arrangement, of_layers
from raypipe.plan.joint.least_step import LeastStep, annealed
from raypipe.plan.joint.moved import moved
from raypipe.plan.joint.orders_of import Ordered, OrdersOf
from raypipe.plan.joint.starts import first_arrangements
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.costs import CostTable
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Rules
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.search.objective import Objective
from raypipe.search.search import load_machine_code

SHAPES = 2
"""Divisions of the devices that are searched."""
MOST_TASKS = 12_000
"""Steps with more tasks are left out: a second or two would build too few orders."""
GAIN = 1e-3
"""A plan must save more than this share of the step to be worth a longer plan file."""
ENOUGH = 2e-3
"""A plan this close to its certificate is not searched."""
LAST = 0.35
"""Share of the time for the orders of the last few arrangements alone."""
FINAL = 2
"""How many these are: an order that is quickly made says which arrangement is best to a few per cent."""
PROOF = 2.0
"""Most of CP-SAT's deterministic seconds for the certificate that says when to stop."""
WALKING = 0.15
"""Share of the time for walks that improve first arrangements by their bounds alone."""
WALK, AFTER_WALK = 2500, 2
"""Moves of such a walk per second of the search, and how many of its arrangements get an order."""
ROUNDS = (0.3, 1.0)
"""Shares of the time that is left, a round each: after each, plans are judged whole, and what they were found to need
beside activations is left free in the next."""
TRIES = 3
"""How often an order that takes too much memory is searched again with less."""


def better_plans(
    judges: Judges, ranked: Sequence[Prediction], seconds: float, certifiers: Certifiers
) -> list[Prediction]:  # fmt: skip
    """Search cut, placement and order together for the shapes of the best plans.

    Args:
        judges: predicts costs and memory.
        ranked: plans that fit, the best first.
        seconds: of all searches together, of this thread's CPU time.
        certifiers: bounds on the steps, with assignments of layers to begin with.

    Returns:
        Plans that fit and are faster than the best, at most one a shape.
    """
    targets = list(_targets(ranked))[:SHAPES]
    found = []
    for p in targets:
        other = better_plan(judges.of(p.candidate), p, seconds / len(targets), certifiers.of(p))
        if other is not None and other.step_s < ranked[0].step_s * (1 - GAIN):
            found.append(other)
    return found


def _targets(ranked: Sequence[Prediction]) -> Iterator[Prediction]:
    """The best plan of each shape that may be arranged anew: one that flushes, and divides and recomputes nothing."""
    seen: set[object] = set()
    for p in ranked:
        c = p.candidate
        if c.stages == 1 or c.shard != "none" or p.form.versions != "flush" or p.form.size != 1 or not p.fits:
            continue
        if c.grid in seen or 3 * 2 * c.stages * c.microbatches > MOST_TASKS:
            continue
        seen.add(c.grid)
        yield p


@no_collection()
def better_plan(judge: Predictor, like: Prediction, seconds: float, certifier: Certifier) -> Prediction | None:
    """The best plan found for one shape, whether or not it is faster than ``like``; None if nothing fits."""
    load_machine_code()
    budget = Budget(seconds)
    rng = random.Random(0)
    own = like.candidate
    c = replace(Candidate.on(own.grid, "auto", placement="free", innermost=own.innermost), update=own.update)
    assigned = certifier.assigned(like, min(PROOF, 0.15 * seconds))
    if like.step_s <= assigned.bound_s * (1 + ENOUGH):
        return None
    barrier = waits_for_all(judge, like)
    objective: Objective = "makespan" if barrier else "span"
    goal = assigned.bound_s - max(0.0, like.step_s - like.compute_s)
    model = PlanModel(judge, c)
    work = judge.layer_times(c.microbatch)
    instance = certifier.instance(like)
    hints = Hints(c.stages, judge.most_stages, LeastStep(instance))
    firsts = list(dict.fromkeys(_firsts(judge, like, assigned.devices, work)))
    walks: list[Arrangement] = []
    part = budget.part(WALKING)
    for a in sorted(firsts, key=hints.least.smooth):
        if part.left > 0:
            walks += annealed(hints.least, a, judge.most_stages, int(WALK * seconds), rng, BORDERS)[:AFTER_WALK]
    firsts = sorted(walks + firsts, key=hints.least.of)
    best: dict[Arrangement, Prediction] = {}
    found: list[Ordered] = []

    def keep(one: Ordered) -> None:
        p = _fitting(judge, c, model, one, OrdersOf(model, objective, budget.part(0.05), rng))
        if p is not None and (one.arrangement not in best or p.step_s < best[one.arrangement].step_s):
            best[one.arrangement] = p

    def reached() -> bool:
        return any(p.step_s <= assigned.bound_s * (1 + ENOUGH) for p in best.values())

    for share in ROUNDS:
        orders = OrdersOf(model, objective, budget.part(share * (1 - LAST)), rng)
        found = arranged(orders, firsts, hints, goal, rng)
        for one in found[:2]:
            keep(one)
        firsts = [one.arrangement for one in found] + firsts
        if budget.left <= 0 or reached():
            break
    for one in sorted(found[1:], key=lambda one: one.value + hints.least.of(one.arrangement))[: FINAL - 1]:
        if one.arrangement not in best and not reached():
            keep(one)
    last = sorted(best.items(), key=lambda item: item[1].step_s + hints.least.of(item[0]))[:FINAL]
    for k, (a, p) in enumerate(last):
        if not reached():
            part = budget.part(1.0 / (len(last) - k))
            best[a] = _searched(judge, c, model, p, part, objective, goal)
    if not best:
        return None
    shortest = min(best.values(), key=lambda p: p.step_s)
    return replace(shortest, moved=moved(shortest, like))


def _firsts(
    judge: Predictor, like: Prediction, assigned: tuple[int, ...] | None, work: Sequence[float]
) -> Iterator[Arrangement]:
    """The plan's own arrangement, the named ones, and the one that the certificate's program found."""
    c, layers = like.candidate, len(work)
    if like.form.replicas == 1:
        yield Arrangement(tuple(own[0] for own in like.cut), like.form.placement[0], layers)
    yield from first_arrangements(work, c.stages, judge.most_stages)
    if assigned is not None and len(set(assigned)) == c.stages:
        yield of_layers(assigned)


@dataclass(slots=True)
class PlanModel:
    """What arrangements cost, as the predictor sees it."""

    judge: Predictor
    candidate: Candidate
    less: list[float] = field(init=False)
    """Per device, bytes to leave free beside what is known to be needed."""
    _stages: dict[range, StageMemory] = field(default_factory=dict)
    _room: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        c = self.candidate
        self.less = [0.0] * c.stages
        self._room = room_bytes(self.judge.profile, c.stages, c.replicas)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.candidate.microbatches

    def costs(self, a: Arrangement) -> CostTable:
        """Seconds of each stage's tasks."""
        return self.judge.costs_of(self.candidate, a.cut, (a.row,), split=True)

    def rules(self, a: Arrangement) -> Rules:
        """Which of its stages are frozen."""
        return Rules(frozen=self.judge.frozen(a.cut))

    def memory(self, a: Arrangement) -> tuple[list[tuple[float, float]], list[float]] | None:
        """See ``orders_of.Model``: in units of the mean activation of each device."""
        stages = [self._stage(own) for own in a.cut]
        devices = self.candidate.stages
        held: list[list[int]] = [[] for _ in range(devices)]
        for s, d in enumerate(a.row):
            held[d].append(s)
        reads = self.candidate.microbatch * self.microbatches * self.candidate.replicas
        sizes = [(0.0, 0.0)] * len(stages)
        limits = [float("inf")] * devices
        for d, own in enumerate(held):
            if not own:
                continue
            state = sum(stages[s].state + stages[s].gradients + stages[s].casts for s in own)
            moment = max(stages[s].workspace + stages[s].messages for s in own)
            inputs = reads * max(self.judge.profile.layers[i].read_bytes for s in own for i in a.cut[s])
            room = self._room[d] - state - moment - inputs - self.less[d]
            whole = [max(stages[s].kept, stages[s].kept_for_w) for s in own]
            unit = sum(whole) / len(own) or 1.0
            if room < sum(whole):
                return None
            for s, kept in zip(own, whole, strict=True):
                sizes[s] = kept / unit, min(kept, stages[s].kept_for_w) / unit
            if room < sum(whole) * self.microbatches:
                limits[d] = room / unit
        return sizes, limits

    def _stage(self, own: range) -> StageMemory:
        if own not in self._stages:
            profile, train = self.judge.profile, self.judge.train
            each = parameter_bytes(profile.dtype, train.optimizer, train.momentum)
            self._stages[own] = stage_memory(profile, own, self.candidate.microbatch, each, split=True)
        return self._stages[own]


def _fitting(
    judge: Predictor, c: Candidate, model: PlanModel, one: Ordered, orders: OrdersOf
) -> Prediction | None:  # fmt: skip
    """The plan of an arrangement's order, or of one that takes less memory where that does not fit; else None.

    Messages that wait are not known before there is an order: where they are too many, less memory is left to
    activations, here and from now on.
    """
    for _ in range(TRIES):
        p = judge.predict_order(c, one.problem.schedule(one.orders), one.arrangement.cut)
        if p.fits:
            return p
        over = [max(0.0, need - most) for need, most in zip(p.memory_bytes, p.capacities, strict=True)]
        model.less = [less + 1.1 * more for less, more in zip(model.less, over, strict=True)]
        other = orders.of(one.arrangement)
        if other is None:
            return None
        one = orders.shorter(other, SHORTEN)
    return None


def _searched(
    judge: Predictor, c: Candidate, model: PlanModel, best: Prediction, budget: Budget, objective: Objective,
    goal: float,
) -> Prediction:  # fmt: skip
    """The plan with its order searched once more, with the time that is left; itself where that is no faster."""
    row = best.form.placement[0]
    memory = model.memory(Arrangement(tuple(own[0] for own in best.cut), row, sum(map(len, best.cut))))
    if memory is None or budget.left <= 0:
        return best
    sizes, limits = memory
    try:
        found = search(
            (row,), c.microbatches, best.costs, memory_limit=limits, sizes=sizes, starts=[judge.schedule_of(best)],
            objective=objective, budget=budget, enough=max(0.0, goal), rules=Rules(frozen=judge.frozen(best.cut)),
        )  # fmt: skip
    except ScheduleError:
        return best
    other = judge.predict_order(c, replace(found.schedule, name="auto"), best.cut)
    return other if other.fits and other.step_s < best.step_s else best
