"""Plans whose cut, placement and order were searched together, from the best plans that the planner has.

It is never worse than these: only a plan that is predicted, whole and within memory, to be faster is returned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.machine_code import compile_ahead, is_kept
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.of_plan import Certifier, Certifiers, waits_for_all
from raypipe.plan.joint import walk_kernel
from raypipe.plan.joint.annealing import BORDERS, SHORTEN, Hints, LeastStep, annealed, arranged, load_walk
from raypipe.plan.joint.arrangement import Arrangement, Stages, StageTables, first_arrangements, of_layers
from raypipe.plan.joint.orders_of import Ordered, OrdersOf
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.costs import CostTable
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Rules
from raypipe.search import list_kernel, search
from raypipe.search.budget import Budget
from raypipe.search.objective import Objective
from raypipe.search.search import load_bounds, load_machine_code, load_orders

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
WALK = 5000
"""Moves of such a walk per second of the search."""
ROUNDS = (0.3, 1.0)
"""Shares of the time that is left, a round each: after each, plans are judged whole, and what they were found to need
beside activations is left free in the next."""
TUNED = 0.3
"""Share of the time for an order in less memory that goes into its due dates."""
TRIES = 4
"""How often an order that takes too much memory is searched again with less."""


def better_plans(
    judges: Judges, ranked: Sequence[Prediction], seconds: float, certifiers: Certifiers
) -> list[Prediction]:
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
    result = []
    for p in targets:
        other = better_plan(judges.of(p.candidate), p, seconds / len(targets), certifiers.of(p))
        if other is not None and other.step_s < ranked[0].step_s * (1 - GAIN):
            result.append(other)
    return result


def load_kernels() -> None:
    """Load all machine code of planning: two seconds of a process, half a minute on a machine's first time."""
    load_machine_code()
    load_walk()


def load_bounds_and_walk() -> None:
    """Load half of it."""
    load_bounds()
    load_walk()


def compile_kernels() -> bool:
    """Begin to compile all of it beside, in two processes, if this machine has not yet; return whether it is begun."""
    kept = is_kept(walk_kernel.shortest) and is_kept(list_kernel.list_schedule)
    return not kept and compile_ahead(load_orders, load_bounds_and_walk)


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
    load_kernels()
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
            walks.append(annealed(hints.least, a, judge.most_stages, int(WALK * seconds), rng, BORDERS))
    firsts = sorted(walks + firsts, key=hints.least.of)
    best: dict[Arrangement, Prediction] = {}
    result: list[Ordered] = []

    def keep(one: Ordered) -> None:
        p = fitting(judge, c, model, one, OrdersOf(model, objective, budget.part(0.05), rng))
        if p is not None and (one.arrangement not in best or p.step_s < best[one.arrangement].step_s):
            best[one.arrangement] = p

    def reached() -> bool:
        return any(p.step_s <= assigned.bound_s * (1 + ENOUGH) for p in best.values())

    for share in ROUNDS:
        orders = OrdersOf(model, objective, budget.part(share * (1 - LAST)), rng)
        result = arranged(orders, firsts, hints, goal, rng)
        for one in result[:2]:
            keep(one)
        firsts = [one.arrangement for one in result] + firsts
        if budget.left <= 0 or reached():
            break
    for one in sorted(result[1:], key=lambda one: one.value + hints.least.of(one.arrangement))[: FINAL - 1]:
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
        a = of_layers(assigned)
        if len(a.row) <= judge.most_stages:
            yield a


@dataclass(slots=True)
class PlanModel:
    """Costs of arrangements, as the predictor sees them."""

    judge: Predictor
    candidate: Candidate
    _tables: StageTables = field(init=False)

    def __post_init__(self) -> None:
        self._tables = StageTables(self.judge.profile, self.judge.train, self.candidate)

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

    def stages(self, starts: NDArray[np.int64], row: NDArray[np.int64], count: int) -> Stages | None:
        """See ``orders_of.Model``."""
        return self._tables.of(starts, row, count)

    def leave_free(self, more: Sequence[float]) -> None:
        """From now on, leave so many bytes of each device free beside what is known to be needed."""
        self._tables.tables.room[:] -= more


def fitting(judge: Predictor, c: Candidate, model: PlanModel, one: Ordered, orders: OrdersOf) -> Prediction | None:
    """The plan of an arrangement's order, or of one that takes less memory where that does not fit; else None.

    Messages that wait are not known before there is an order: where they are too many, less memory is left to
    activations from now on. Activations come in lumps, so that an order may be far from its limit: here the limit is
    what the order held, less what was too much.
    """
    for k in range(TRIES):
        p = judge.predict_order(c, one.problem.schedule(one.orders), one.arrangement.cut)
        if p.fits:
            return p
        over = [max(0.0, need - most) for need, most in zip(p.memory_bytes, p.capacities, strict=True)]
        if k == 0:
            model.leave_free([1.1 * max(over)] * len(over))
        cap = list(one.problem.cap)
        for d, peak in enumerate(one.problem.peaks(one.orders)):
            if over[d] > 0:
                cap[d] = peak * (1 - over[d] / max(over[d], p.memory[d].in_flight))
        others = [orders.of(one.arrangement, cap=cap)]
        if one.way is not None:
            others.append(orders.tuned(one.arrangement, one.way, TUNED, cap))
        best = min((other for other in others if other is not None), key=lambda other: other.value, default=None)
        if best is None:
            return None
        one = orders.shorter(best, SHORTEN)
    return None


def _searched(
    judge: Predictor,
    c: Candidate,
    model: PlanModel,
    best: Prediction,
    budget: Budget,
    objective: Objective,
    goal: float,
) -> Prediction:
    """The plan with its order searched once more, with the time that is left; itself where that is no faster."""
    row = best.form.placement[0]
    a = Arrangement(tuple(own[0] for own in best.cut), row, sum(map(len, best.cut)))
    stages = model.stages(*a.arrays(len(row)), len(row))
    if stages is None or budget.left <= 0:
        return best
    try:
        result = search(
            (row,),
            c.microbatches,
            best.costs,
            memory_limit=stages.cap.tolist(),
            sizes=[(whole, waiting) for whole, waiting in stages.sizes.tolist()],
            starts=[judge.schedule_of(best)],
            objective=objective,
            budget=budget,
            enough=max(0.0, goal),
            rules=Rules(frozen=judge.frozen(best.cut)),
        )
    except ScheduleError:
        return best
    other = judge.predict_order(c, replace(result.schedule, name="auto"), best.cut)
    return other if other.fits and other.step_s < best.step_s else best


def moved(found: Prediction, like: Prediction) -> str:
    """One clause: the stages, what changed its device, and how much the slowest device's work fell."""
    layers = sum(map(len, found.cut))
    where, was = _devices(found), _devices(like)
    other = sum(a != b for a, b in zip(where, was, strict=True))
    slowest, before = max(_work(found)), max(_work(like))
    parts = [f"{other} of {layers} layers on another device than in {like.candidate.schedule}"]
    if found.form.stages != like.form.stages:
        parts.append(f"{found.form.stages} stages for {like.form.stages}")
    change = slowest / before - 1 if before else 0.0
    if abs(change) >= 5e-4:
        parts.append(f"the slowest device has {abs(change):.1%} {'less' if change < 0 else 'more'} work")
    return "cut, placement and order found together: " + ", ".join(parts)


def _devices(p: Prediction) -> list[int]:
    """The device of each layer, in the first of the plan's own replicas."""
    return [d for own, d in zip(p.cut, p.form.placement[0], strict=True) for _ in own]


def _work(p: Prediction) -> list[float]:
    """Per device, seconds of a micro-batch's tasks, averaged over replicas."""
    costs = p.costs
    each = [sum(times) for times in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    result = [0.0] * p.candidate.stages
    for row in p.form.placement:
        for s, d in enumerate(row):
            result[d] += each[s] / p.form.replicas
    return result
