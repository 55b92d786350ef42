"""Plans whose devices divide the rows of the model's head, beside the best plans whose head is whole.

They are 1F1B's with more stages than layers can make (``families.vocabulary``), so no search over cuts comes to them:
on the divisions of the devices on which they may be fastest, each is made whole and predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from raypipe.cost.divided_head import divided_cut, divided_head
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import as_job_runs
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.rules.check import vocabulary_rules
from raypipe.job.train_spec import HEADS
from raypipe.plan.best_first import Ranking
from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import PlanChoice
from raypipe.plan.cut.layers import cut_layers, line_of
from raypipe.plan.plan import sharded
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.plan.tensor_groups import ALONE, sharing_of
from raypipe.plan.watch import Watch
from raypipe.schedule import generate
from raypipe.schedule.passes import add_recompute
from raypipe.schedule.shape import Grid, pipeline_shape

GRIDS = 6
"""Divisions of the devices on which plans are made."""
MOST_TASKS = 20_000
"""Steps with more tasks are left out: making one takes a second."""


def refused(choice: PlanChoice) -> str | None:
    """Return why no plan divides the head of this job's model, as a clause; None if some may."""
    job, profile = choice.job, choice.profiles.get(ALONE)
    asked = job.parallel.model_copy(update={"vocabulary": "split"})
    broken = next(vocabulary_rules(job.train, asked), None)
    if broken is not None:
        return broken[1]
    if job.train.updates_alone or not set(HEADS) <= {*job.train.muon_excludes}:
        return f"{job.train.optimizer} reads whole rows and columns"
    if asked.experts != 1 or asked.context != 1:
        return "plans of copies that divide experts or sequences have whole heads"
    if profile is None or profile.other_kinds:
        return "devices are of several kinds"
    try:
        divided_head(profile, 2)
    except SpecError as error:
        return error.why
    return None


def divided_heads(choice: PlanChoice, most_s: float, watch: Watch) -> Ranking:
    """Return plans that divide the head's rows, fit, and have a shorter step than ``most_s``."""
    result = Ranking()
    if refused(choice) is not None:
        return result
    heads = _Heads(choice)
    for grid in [g for g in heads.grids() if heads.least(g) < most_s][:GRIDS]:
        if watch.over:
            break
        fitting = list(heads.plans(grid))
        result.searched, result.timed = result.searched + 1, result.timed + len(fitting)
        result.best += (p for p in fitting if p.step_s < most_s)
    return result


@dataclass(slots=True)
class _Heads:
    choice: PlanChoice
    _judges: dict[int, Predictor] = field(default_factory=dict)

    def judge(self, shares: int) -> Predictor:
        """Return what judges plans of so many shares."""
        if shares not in self._judges:
            whole, job = self.choice.judge.by[ALONE], self.choice.job
            own = divided_head(without_noise(self.choice.profiles[ALONE]), shares)
            self._judges[shares] = Predictor(
                as_job_runs(own, job.train, job.parallel),
                job.train,
                whole.most_stages,
                syncs=whole.syncs,
                asked=whole.asked,
                divides=whole.divides,
            )
        return self._judges[shares]

    def grids(self) -> list[Grid]:
        """Return the divisions of the devices on which there are such plans, the most promising first."""
        head = self.choice.profiles[ALONE].head
        assert head is not None, "else it is refused"
        deepest = self.choice.judge.by[ALONE].most_stages
        every = (
            g
            for g in self.choice.grids
            if 1 < g.stages <= min(deepest, head.rows) and sharing_of(g) == ALONE
            if head.rows > (g.stages - 1) * head.rows_of(g.stages) and 7 * g.stages * g.microbatches <= MOST_TASKS
        )
        # 1F1B fills and drains the pipeline in each step.
        return sorted(every, key=lambda g: self.least(g) * (1 + (g.stages - 1) / g.microbatches))

    def least(self, grid: Grid) -> float:
        """Return a lower bound on the step: all work evenly on all devices."""
        # There is a judge for every number of stages; what they have in common is asked of one.
        body = self.choice.judge.by[ALONE].layer_times(grid.microbatch)[:-1]
        rest, share, *_ = self.judge(grid.stages).profile.layers[len(body) :]
        last, each = (t.forward + t.joint for t in (times_at(layer, grid.microbatch) for layer in (rest, share)))
        return (sum(body) + last + grid.stages * each) * grid.microbatches / grid.stages

    def plans(self, grid: Grid) -> Iterator[Prediction]:
        """Yield the plan of a division of the devices; where it does not fit otherwise, with activations of blocks
        recomputed, or those whose copies divide weights, gradients or optimizer state."""
        judge, shares, whole = self.judge(grid.stages), grid.stages, Candidate.on(grid, "1f1b", vocabulary="split")
        body = judge.layer_times(grid.microbatch)[: -shares - 1]
        cut = divided_cut(cut_layers(body, line_of(shares)).stages, shares)
        again = bool(self.choice.judge.by[ALONE].recompute)
        costs = judge.costs_of(whole, cut, whole.form.placement, True)
        try:
            order = generate(whole.schedule, pipeline_shape(whole, whole.microbatches), costs)
        except ScheduleError:
            return
        for c in filter(None, map(self.choice.pick, (whole, *judge.shard_ways(whole)))):
            fits = False
            for way in ("none", "full"):
                if not fits and (c.recompute == way or (way == "full" and again)):
                    made = order if way == "none" else add_recompute(order, "early", range(shares))
                    p = judge.predict_order(replace(c, recompute=way), sharded(made, c), cut)
                    if fits := p.fits:
                        yield p
            if fits and c.shard == "none":
                return
