"""The driver: starts the stage actors, keeps their queues filled, collects what they report, saves checkpoints.

It never stands between two devices: every device has its whole step as a program, and at least ``QUEUED_STEPS`` steps
are
queued with it, so that no device waits for the driver.
"""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from raypipe.checkpoint import LOSS, best, commit, forget_best, keep_best, step_directory
from raypipe.data import known_fields, tokens_per_sample
from raypipe.errors import DivergenceError, SampleCountError
from raypipe.job.recompute_layers import layers_to_recompute
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel, build_model
from raypipe.observe.run_log import RunLog
from raypipe.plan.online.better_order import Running, runs_ahead
from raypipe.plan.online.measured_steps import StepClock, StepPrediction
from raypipe.plan.online.raise_kept_share import Raiser, raises
from raypipe.plan.online.replan import Replanner
from raypipe.plan.plan import Plan, build_schedule, forward_only
from raypipe.runtime.cluster.host_check import check_hosts
from raypipe.runtime.cluster.worker_group import WorkerGroup
from raypipe.runtime.communicators import Topology, rendezvous_of
from raypipe.runtime.early_stop import Patience, patience_of
from raypipe.runtime.observing import Observing
from raypipe.runtime.setup import Setup
from raypipe.runtime.step import StepResult
from raypipe.runtime.tensor_ranks import tensor_rank_edges, tensor_rank_groups, tensor_rank_of
from raypipe.runtime.update.gradients import TiedHolders, shared_groups
from raypipe.runtime.update.norm import clip_factor, norm_of
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.schedule.lowering.counted import check_counted
from raypipe.schedule.lowering.programs import Program, edges, programs, step_programs

QUEUED_STEPS = 2
"""Steps queued with the actors beyond the one being collected."""

DISCARD_S = 60.0
"""Longest wait for saves that nobody will commit; they are queued behind two steps at most."""

Saved = Callable[[int, Path, dict[str, Any]], None]
"""Told of every complete checkpoint: (step, directory, metrics)."""


@dataclass(slots=True)
class _Ticket:
    kind: str
    """``step``, ``eval`` or ``save``."""
    step: int
    """Steps done once it is through."""
    refs: list[Any]
    clock: StepClock
    part: Part = WHOLE
    meta: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint says of itself."""
    best: bool = False
    """The checkpoint is the best so far."""


class Driver:
    """One attempt at a run: from the newest checkpoint, or the start, to the last step or a failure."""

    def __init__(self, job: JobSpec, plan: Plan, directory: Path, log: RunLog, saved: Saved) -> None:
        self.job, self.plan, self.directory = job, plan, directory
        self.log, self.saved = log, saved
        self._observe = Observing(log)
        self.schedule = build_schedule(plan, job.train.batch)
        self._clips = job.train.clip is not None
        self.tokens_per_step = job.train.batch * tokens_per_sample(job, directory / "data")
        self.clock = StepClock(self.schedule)
        self.ahead = runs_ahead(plan.parallel, self._clips, self.schedule, CostTable.even(self.schedule.stages))
        self.replanner: Replanner | None = None
        self.raiser = Raiser(plan, job.train.batch, self._clips) if raises(plan.parallel) else None
        if self.raiser is None:
            self._begin_replanning()
        self._settled = False
        self._saved: Plan | None = plan if self.raiser is None else None
        """What is in the run's directory."""
        self.patience: Patience | None = None
        self._best_loss = math.inf
        """Validation loss of the best checkpoint."""
        self.last_metrics: dict[str, Any] = {}
        self.counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "p2p": 0, "p2p_bytes": 0}
        self._committed: tuple[int, Path] | None = None
        """The newest checkpoint that a resume would go on from: steps done, and where it is."""
        self.resumed_from: int | None = None
        self.memory_bytes: list[int] = []

    def _begin_replanning(self) -> None:
        """Where the job wants it; after the search for a share of layers, which moves memory and times alike."""
        if self.plan.parallel.replans:
            present = Running(self.plan, self.schedule, self.ahead)
            self.replanner = Replanner(present, self.job.train.batch, self._clips)

    def run(self, workers: WorkerGroup, checkpoint: Path | None, done: int) -> None:
        """Train on ``workers``, from ``checkpoint``, which has ``done`` steps behind it, to the job's last step or to
        where it stops early.

        Raises:
            ClusterError: the nodes cannot run the job together.
            ray.exceptions.RayActorError: a stage actor died.
            DivergenceError: the loss, a gradient or what a checkpoint would hold is no longer a number.
            SampleCountError: a step counted another number of samples than its mini-batch has.
            RaypipeError: as the stage actors raise it, wrapped by Ray.
        """
        self.resumed_from = done if checkpoint is not None else None
        self._committed = (done, checkpoint) if checkpoint is not None else None
        self._save_plan()
        self._look_back(done)
        self._setup(workers, checkpoint)
        last = self._loop(workers, done)
        self._report(self._observe("the prediction", self.clock.predict, at_end=True), last)
        self.memory_bytes = ray.get(workers.call("memory_bytes"))

    def _look_back(self, done: int) -> None:
        """What an earlier attempt has found out about validation."""
        train = self.job.train
        if train.early_stop is not None:
            self.patience = patience_of(self.directory, train.early_stop, done)
        if train.keeps_best:
            root = self.directory / "checkpoints"
            held = best(root)
            if held is not None and held.step > done:  # of steps that will be run again, perhaps by another job
                forget_best(root)
            elif held is not None:
                self._best_loss = held.meta[LOSS]

    def _setup(self, workers: WorkerGroup, checkpoint: Path | None) -> None:
        check_hosts(workers, self.directory)
        schedule, tensor = self.schedule, self.plan.parallel.tensor
        job = self.job.model_copy(update={"parallel": self.plan.parallel})
        fields = known_fields(self.directory / "data")
        layers = build_model(job, fields, tensor_rank=0)
        samples = int(self.plan.parallel.microbatch * schedule.size)
        train, evaluate = self._lower()
        tied = tied_holders(self.plan, schedule, layers)
        setup = Setup(
            device=0,
            tensor_rank=0,
            job=job,
            cut=self.plan.cut,
            recomputed=layers_to_recompute(self.plan.parallel, self.plan.cut),
            search_recompute=self.raiser is not None,
            placement=schedule.placement,
            topology=Topology(
                peers=tuple(x.peer for x in workers.locations),
                rendezvous=rendezvous_of(workers.locations),
                edges=tensor_rank_edges(edges(schedule), tensor),
                groups=tensor_rank_groups(shared_groups(schedule.placement, tied), schedule.devices, tensor),
                transport=self.plan.parallel.transport,
                run_id=workers.run_id,
                timeout_s=job.train.message_timeout_s,
            ),
            tied=tied,
            samples_per_microbatch=samples,
            microbatches=schedule.microbatches,
            versions=schedule.versions,
            train={},
            evaluate=evaluate[0],
            data=self.directory / "data",
            fields=fields,
            checkpoint=checkpoint,
        )
        calls = []
        for rank, actor in enumerate(workers.actors):
            device, tensor_rank = tensor_rank_of(rank, tensor)
            own = {part: rows[device] for part, rows in train.items()}
            calls.append(
                actor.setup.remote(
                    replace(setup, device=device, tensor_rank=tensor_rank, train=own, evaluate=evaluate[device])
                )
            )
        held = ray.get(workers.note(calls))
        for name in sorted({name for _, joint in held for name in joint}):
            self.log.event("notice", message=f"the weight gradient of {name} cannot wait: it is computed in B")
        self.log.event(
            "started",
            devices=[
                {"name": title, "node": at.peer.node, "device": at.peer.device, "pid": at.pid, "parameters": count}
                for title, at, (count, _) in zip(workers.titles, workers.locations, held, strict=True)
            ],
            resumed_from=self.resumed_from,
        )

    def _lower(self) -> tuple[dict[Part, list[Program]], list[Program]]:
        """Every device's programs: of training steps, by how they begin and end, and of validation."""
        train, evaluate = step_programs(self.schedule, self.ahead), programs(forward_only(self.schedule))
        check_counted(train, evaluate, self.schedule.stages, self.schedule.microbatches)
        return train, evaluate

    def _loop(self, workers: WorkerGroup, done: int) -> int:
        """Returns the number of steps done."""
        pending: deque[_Ticket] = deque()
        try:
            return self._steps(workers, done, pending)
        except (DivergenceError, SampleCountError):
            for ticket in pending:
                self._discard(ticket)
            raise

    def _steps(self, workers: WorkerGroup, done: int, pending: deque[_Ticket]) -> int:
        train = self.job.train
        fills, through = True, done
        for step in range(done, train.steps):
            if self.patience is not None and self.patience.exhausted:
                break
            last = step + 1 == train.steps
            evaluates = last or bool(train.eval_every and (step + 1) % train.eval_every == 0)
            saves = last or bool(train.checkpoint_every and (step + 1) % train.checkpoint_every == 0)
            part = (fills, evaluates or saves) if self.schedule.versions != "flush" else WHOLE
            fills = part[1]
            if self.raiser is not None:
                self._raise(workers, self.raiser, step)
            if self.replanner is not None:
                target = self._observe("planning again", self.replanner.take)
                self._report_events(self.replanner, step)
                if target is not None:
                    self._swap(workers, target)
            pending.append(_Ticket("step", step + 1, workers.call("run_step", step, part), self.clock, part))
            if evaluates:
                refs = [ref for batch in range(train.eval_batches) for ref in workers.call("evaluate", batch)]
                pending.append(_Ticket("eval", step + 1, refs, self.clock))
            save = _Ticket("save", step + 1, [], self.clock)
            if evaluates and train.keeps_best:
                # What comes next depends on it, so nothing is queued behind it: the parameters stay those that were
                # validated. It costs the devices one wait for the driver a validation.
                self._collect_all(pending)
                loss = self.last_metrics["val_loss"]
                save.meta, save.best = {LOSS: loss}, loss < self._best_loss
                if save.best:
                    self._best_loss = loss
                saves = saves or save.best or (self.patience is not None and self.patience.exhausted)
            if saves:
                save.refs = workers.call("save", self._checkpoint_path(step + 1))
                pending.append(save)
            while sum(t.kind == "step" for t in pending) > QUEUED_STEPS:
                self._collect(pending.popleft())
            through = step + 1
        self._collect_all(pending)
        if self.patience is not None and through < train.steps:
            self.log.event("early_stop", step=through, message=str(self.patience))
        return through

    def _collect_all(self, pending: deque[_Ticket]) -> None:
        while pending:
            self._collect(pending.popleft())

    def _checkpoint_path(self, step: int) -> Path:
        path = step_directory(self.directory / "checkpoints", step)
        if path.exists() and not (path / "manifest.json").exists():
            shutil.rmtree(path)  # left by an attempt that died while saving
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _discard(self, ticket: _Ticket) -> None:
        """Remove what a queued save has written: nobody will commit it."""
        if ticket.kind == "save":
            _, late = ray.wait(ticket.refs, num_returns=len(ticket.refs), timeout=DISCARD_S)
            if not late:
                shutil.rmtree(step_directory(self.directory / "checkpoints", ticket.step), ignore_errors=True)

    def _collect(self, ticket: _Ticket) -> None:
        results = ray.get(ticket.refs)
        if ticket.kind == "step":
            self._collect_step(ticket, results)
        elif ticket.kind == "eval":
            ticket.clock.pause()
            batches = self.job.train.eval_batches
            self._check_samples(f"validation after step {ticket.step}", results, batches)
            loss = math.fsum(r.loss_sum for r in results) / batches
            if not math.isfinite(loss):
                raise self._diverged(ticket.step, f"the validation loss is {loss}")
            self.last_metrics["val_loss"] = loss
            self.log.metric({"step": ticket.step, "val_loss": loss})
            if self.patience is not None:
                self.patience.saw(ticket.step, loss)
        else:
            ticket.clock.pause()
            path = step_directory(self.directory / "checkpoints", ticket.step)
            broken = next((key for _, key in results if key is not None), None)
            if broken is not None:
                self._discard(ticket)
                raise self._diverged(ticket.step, f"{broken} is not finite after the update")
            shards = [shard for shard, _ in results if shard is not None]
            commit(path, ticket.step, shards, {"job": self.job.name, **ticket.meta})
            self._committed = (ticket.step, path)
            if ticket.best:
                keep_best(path.parent, path)
            self.log.event("checkpoint", step=ticket.step, path=str(path), best=ticket.best)
            self.saved(ticket.step, path, {"step": ticket.step, **self.last_metrics})

    def _check_samples(self, where: str, results: list[StepResult], batches: int) -> None:
        """Every sample is in the loss once: a part of a mini-batch would train all the same, and worse.

        Raises:
            SampleCountError: there are more or fewer.
        """
        due = self.job.train.batch * batches
        counted = sum(r.samples for r in results)
        if counted != due:
            raise SampleCountError(
                where, f"its loss is of {counted} samples instead of {due}",
                "this is a fault of raypipe: report it with the run's plan.json",
            )  # fmt: skip

    def _diverged(self, step: int, what: str) -> DivergenceError:
        """The error of a step whose numbers are not finite; says what a resume would begin with."""
        fix = "lower train.lr, or set a longer warm-up" + (" or train.clip" if self.job.train.clip is None else "")
        if self._committed is None:
            return DivergenceError(f"step {step}", what, f"{fix}; no checkpoint was written before, so train anew")
        done, path = self._committed
        return DivergenceError(f"step {step}", what, f"{fix}; --resume then goes on from step {done} ({path})")

    def _swap(self, workers: WorkerGroup, target: Running) -> None:
        """Run another plan from the next step on: every device gets its new programs between two steps."""
        if target.schedule is self.schedule and target.ahead == self.ahead:  # the same plan, measured anew
            self.clock = StepClock(self.schedule)
            return
        self.plan, self.schedule, self.ahead = target
        train, evaluate = self._lower()
        for rank, actor in enumerate(workers.actors):
            device, _ = tensor_rank_of(rank, self.plan.parallel.tensor)
            own = {part: rows[device] for part, rows in train.items()}
            recomputed = layers_to_recompute(self.plan.parallel, self.plan.cut)
            workers.note([actor.install.remote(own, evaluate[device], recomputed, self._measures)])
        self.clock = StepClock(self.schedule)
        self._save_plan()

    def _save_plan(self) -> None:
        """What a restart begins with: nothing that has not been seen to work."""
        safe = self.plan
        if self.replanner is not None:
            safe = self.replanner.proven
        elif self.raiser is not None:
            safe = self.raiser.safe
        if safe is not self._saved:
            safe.save(self.directory / "plan.json")
            self._saved = safe

    @property
    def _measures(self) -> bool:
        return self.raiser is not None and not self.raiser.done

    def _raise(self, workers: WorkerGroup, raiser: Raiser, step: int) -> None:
        """Take up another share of layers to keep, or stop measuring once it is found."""
        plan = self._observe("the search for parallel.alphas", raiser.take)
        for fields in raiser.news:
            self.log.event("recompute", step=step, **fields)
        raiser.news.clear()
        if plan is not None or (raiser.done and not self._settled):
            self._settled = raiser.done
            plan = plan or self.plan
            schedule = build_schedule(plan, self.job.train.batch)
            costs = CostTable.even(schedule.stages)
            self._swap(workers, Running(plan, schedule, runs_ahead(plan.parallel, self._clips, schedule, costs)))
            if raiser.done:
                self._begin_replanning()

    def _report_events(self, replanner: Replanner, step: int) -> None:
        for news in replanner.news:
            self.log.event(news.event, step=step, **news.fields)
        if replanner.news:
            self._save_plan()
        replanner.news.clear()

    def _report(self, prediction: StepPrediction | None, step: int) -> None:
        if prediction is not None:
            self.log.event("predicted", step=step, step_s=prediction.step_s, bubble_ratio=prediction.bubble_ratio)

    def _collect_step(self, ticket: _Ticket, results: list[StepResult]) -> None:
        step = ticket.step
        self._check_samples(f"step {step}", results, 1)
        loss = math.fsum(r.loss_sum for r in results)
        if not math.isfinite(loss):
            raise self._diverged(step, f"the training loss is {loss}")
        norm = norm_of(r.norm_squared for r in results)
        if not math.isfinite(norm):  # the loss may be finite still, and the parameters are not any more
            raise self._diverged(step, f"the gradient norm is {norm}, the training loss {loss:.4f}")
        if results[0].optimistic and clip_factor(self.job.train.clip or math.inf, norm) < 1.0:
            self.log.event("undone", step=step, grad_norm=norm)
        # A device's members work in step: the first one's times stand for all.
        times = [r.times for r in results[:: self.plan.parallel.tensor]]
        step_s, bubble_ratio = ticket.clock.add(ticket.part, times)
        self.counts["p2p"] = sum(r.received for r in results)
        self.counts["p2p_bytes"] = sum(r.received_bytes for r in results)
        self.counts["all_reduce"] = round(math.fsum(r.all_reduces for r in results))
        if self.plan.parallel.tensor > 1:
            self.counts["tensor_all_reduce"] = sum(r.tensor_all_reduces for r in results) // self.plan.parallel.tensor
        self.last_metrics |= {"loss": loss}
        self.log.metric(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "lr": learning_rate(self.job.train, step - 1),
                "step_s": step_s,
                "tokens_per_s": self.tokens_per_step / step_s,
                "bubble_ratio": bubble_ratio,
            }
        )
        prediction = self._observe("the prediction", ticket.clock.predict)
        self._report(prediction, step)
        if self.raiser is not None and ticket.clock is self.clock:
            memory = [r.memory for r in results[:: self.plan.parallel.tensor]]
            self._observe("the search for parallel.alphas", self.raiser.saw, memory, step_s, self.clock.so_far)
        if self.replanner is not None:
            if ticket.clock is self.clock:  # not a step that was queued before the plan changed
                costs = prediction.costs if prediction is not None else None
                self._observe("planning again", self.replanner.saw, step_s, costs)
            self._report_events(self.replanner, step)


def tied_holders(plan: Plan, schedule: Schedule, model: LayeredModel) -> tuple[TiedHolders, ...]:
    """Tied groups of the model with the devices that hold them under a plan."""
    stage_of = {layer: stage for stage, layers in enumerate(plan.cut) for layer in layers}
    return tuple(
        TiedHolders(
            name=group.name,
            parameters=tuple(dict.fromkeys(name for _, name in group.parameters)),
            layer=group.parameters[0][0],
            ranks=tuple(
                sorted({held[stage_of[layer]] for held in schedule.placement for layer, _ in group.parameters})
            ),
        )
        for group in model.tied
    )
