"""The driver queues steps, validations and saves with all workers, and collects their results in the same order.

Devices never wait for the driver inside a step: each of them has its whole step as a program, and at least
``QUEUED_CALLS`` calls, of one step or of several short ones (``calls.StepsPerCall``), are queued ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.checkpoint import Checkpoint, open_checkpoint
from raypipe.data import tokens_per_sample
from raypipe.errors import CheckpointError, SampleCountError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import Stop, asked_to_stop
from raypipe.observe.run_log import RunLog, rewind, slow_devices
from raypipe.observe.timelines import LiveTimelines
from raypipe.plan.online.better_order import running_of
from raypipe.plan.online.controller import MeasuredStep
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.sequence import ControllerSequence
from raypipe.plan.plan import Plan
from raypipe.runtime.calls import CompiledSwap, DoneStep, Due, Dues, RowOrders, StepsPerCall, Ticket
from raypipe.runtime.early_stop import Patience, patience_of
from raypipe.runtime.executor.metrics import ValidationMetrics
from raypipe.runtime.executor.step import StepResult, expert_loads
from raypipe.runtime.hosts.node_files import clear
from raypipe.runtime.in_place import RECOVERABLE, InPlace, LeavingWorkers, LostWorkers, Recovered, in_place_for
from raypipe.runtime.recovery.nonfinite import NonFiniteError, NonFinitePolicy, left_out_before, left_out_of
from raypipe.runtime.recovery.replacement import completed, outcomes
from raypipe.runtime.run_metrics import RunMetrics, RunResults
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies
from raypipe.runtime.saving.saves import RunCheckpoints, Saved, Saves
from raypipe.runtime.set_up_workers import install, set_up
from raypipe.runtime.worker.samples import samples_streamed
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.norm_policy import NormPolicy

QUEUED_CALLS = 2
"""Calls of steps queued with the actors beyond the one being collected."""


class Driver:
    """Runs one attempt: from a checkpoint, or from the start, to the last step or to a failure."""

    def __init__(
        self,
        job: JobSpec,
        plan: Plan,
        directory: Path,
        log: RunLog,
        saved: Saved,
        copies: NeighbourCopies | None = None,
        validation: ValidationMetrics | None = None,
    ) -> None:
        self.job, self.directory, self.log = job, directory, log
        batch, clips = job.train.batch, job.train.needs_norm
        self.running = running_of(plan, batch, clips)
        self.clock = StepClock(self.schedule)
        self.controller = ControllerSequence(self.running, batch, clips, self._notice, slow_devices(directory))
        self.checkpoints = RunCheckpoints(job, directory, log, saved)
        self.saves = Saves(self.checkpoints, log)
        self.copies = copies if copies is not None else NeighbourCopies(0, log)
        self.nonfinite = NonFinitePolicy(job.train.on_nonfinite)
        self._rewinds = 0
        self.metrics = RunMetrics(job, plan, directory, self._notice)
        tokens = batch * tokens_per_sample(job, directory / "data")
        self.results = RunResults(job, directory / "data", tokens, log, self.metrics, self.nonfinite)
        self.results.validation_metrics = validation
        self.memory_bytes: list[int] = []
        self._live = LiveTimelines(directory)
        self.in_place: InPlace | None = None
        """Replaces workers that die; None where none can be."""
        self._validated = -1
        """Steps done at the newest validation that was collected."""
        self._to_save: tuple[int, float, float, bool] | None = None
        """What the newest validation has decided: number of steps, its loss, its score, whether it is the best."""
        self.paused: dict[str, Any] | None = None
        """Number of steps done and reason, where the run was asked to end for now."""
        self.interrupted: dict[str, Any] | None = None
        """The same, where the process that started the run has to end."""
        self._pending: deque[Ticket] = deque()
        self._unread: Ticket | None = None
        """The newest step, where its result has to be asked for; see ``_read``."""
        self._stored = plan
        """The plan that the run's ``plan.json`` holds now."""
        self._swap = CompiledSwap(log)
        self._per_call = StepsPerCall()
        self._orders = RowOrders(job, directory / "data")
        self._leaving = LeavingWorkers()
        self._dues = Dues(job.train, directory, self.saves, self.copies)

    @property
    def schedule(self) -> Schedule:
        """The schedule that newly queued steps run."""
        return self.running.schedule

    @property
    def norm(self) -> NormPolicy:
        """Return what updates do about the global gradient norm."""
        if not self.job.train.needs_norm:
            return "none"
        return "optimistic" if self.running.ahead else "wait"

    @property
    def patience(self) -> Patience | None:
        """Return what decides when validation no longer improves; None if nothing does."""
        return self.results.patience

    @property
    def counts(self) -> dict[str, int]:
        """Number of messages, their bytes and the collectives between devices in the newest step."""
        return self.results.counts

    def _notice(self, text: str) -> None:
        self.log.event("notice", message=text)

    def run(self, workers: WorkerGroup, checkpoint: Path | None, done: int) -> None:
        """Train on ``workers`` until the job's last step, or until validation stops improving.

        Args:
            workers: the running worker group.
            checkpoint: where to read parameters and optimizer state from; None to start afresh.
            done: number of steps that ``checkpoint`` was trained for; 0 without one.

        Raises:
            ClusterError: the nodes cannot run the job together.
            ray.exceptions.RayActorError: a worker died.
            DivergenceError: the loss, a gradient or a tensor to be saved is infinite or not a number.
            SampleCountError: a step counted another number of samples than its mini-batch has.
            RaypipeError: a worker raised it; Ray has wrapped it.
        """
        self._store_plan()
        self.checkpoints.resume(checkpoint, done)
        self._begin(done, left_out_before(checkpoint))
        first = done + self.checkpoints.left_out
        with samples_streamed(self.job, self.directory, first, workers.run_id) as workers.samples:
            self._run(workers, checkpoint, done)
        self.memory_bytes = workers.answers(workers.call("memory_bytes"), self.job.train.message_timeout_s)
        clear(workers.leaders_apart(), self.directory)

    def _run(self, workers: WorkerGroup, checkpoint: Path | None, done: int) -> None:
        self.in_place = in_place_for(self.job, self.running, workers, self.directory, self.copies)
        self._setup(workers, checkpoint, done)
        workers.waiting.stand_by(workers, self.job.train.standby)
        self.metrics.begin(workers.run_id.partition("-")[0], workers.locations)
        try:
            last = self._loop(workers, done)
            self.controller.finish(self.clock)
            self._log_events(last)
        finally:
            self.saves.close()
            self.metrics.close()

    def _begin(self, done: int, left_out: int) -> None:
        """Take up the state of a run after ``done`` steps."""
        if self.job.train.early_stop is not None:
            self.results.patience = patience_of(self.directory, self.job.train, done)
        self.checkpoints.left_out = left_out

    def _setup(self, workers: WorkerGroup, checkpoint: Path | Checkpoint | None, done: int) -> None:
        self._measures, left_out = self.controller.measures_memory, self.checkpoints.left_out
        twins = self.in_place is not None and self.in_place.twins
        given = (self.job, self.running, self.directory, checkpoint, self._measures, done, twins, left_out)
        per_rank = set_up(workers, *given)
        for message in workers.apart.values():
            self._notice(message)
        compiled = self._swap.begin(workers, self.job.train, self.running.plan.parallel)
        waiting = {name for rank, (_, joint) in enumerate(per_rank) for name in compiled.get(rank, joint)}
        for name in sorted(waiting):
            self.log.event("notice", message=f"the weight gradient of {name} cannot wait: it is computed in B")
        self.log.event(
            "started",
            devices=[
                {"name": title, "node": at.peer.node, "device": at.peer.device, "pid": at.pid, "parameters": count}
                for title, at, (count, _) in zip(workers.titles, workers.locations, per_rank, strict=True)
            ],
            resumed_from=done if checkpoint is not None else None,
            process_groups=workers.process_groups,
        )

    def _loop(self, workers: WorkerGroup, done: int) -> int:
        """Queue and collect everything; return the number of steps done."""
        while True:
            try:
                steps_done = self._steps(workers, done)
                break
            except (NonFiniteError, SampleCountError) as error:
                called = [(one.save, one.reports(outcomes(one.refs))) for one in self._pending]
                self.saves.drain(workers, called, self.job.train.message_timeout_s)
                if isinstance(error, SampleCountError):
                    raise
                done = self._rewind(workers, error)
        if self.patience is not None and self.patience.exhausted and steps_done < self.job.train.steps:
            self.log.event("early_stop", step=steps_done, message=str(self.patience))
        return steps_done

    def _rewind(self, workers: WorkerGroup, error: NonFiniteError) -> int:
        """Go back to the last checkpoint; return its number of steps done.

        Raises:
            DivergenceError: the run is to stop.
        """
        try:
            to = self.nonfinite.rewind(error, self.checkpoints.newest, self.checkpoints.root, self.checkpoints.left_out)
        except NonFiniteError as final:
            self.metrics.diverged()
            raise self.checkpoints.diverged(final.step, final.what) from None
        for message in to.notices:
            self._notice(message)
        self.saves.newest = to.done
        self.copies.forget()
        self._orders.forget()
        self.checkpoints.resume(to.checkpoint, to.done)
        self._rewinds += 1
        workers.run_id = f"{workers.run_id.partition('.r')[0]}.r{self._rewinds}"
        workers.locate()
        self._repeat_from(workers, to.checkpoint, to.done, to.left_out)
        fields = {"from_step": error.step, "left_out": error.step - to.done, "message": error.what}
        self._tell("rewound", to.done, fields)
        return to.done

    def _repeat_from(self, workers: WorkerGroup, checkpoint: Path | Checkpoint | None, done: int, left_out: int) -> int:
        """Set the workers up at an earlier state, and forget what came after; return how many logged steps repeat."""
        self._pending.clear()
        self._unread = self._to_save = None
        self._validated = min(self._validated, done)
        repeated = rewind(self.directory, done)
        self.results.forget()
        self._begin(done, left_out)
        self._setup(workers, checkpoint, done)
        self._pause()
        return repeated

    def _steps(self, workers: WorkerGroup, done: int) -> int:
        """Run everything, replacing workers that die; return the number of steps done."""
        begun = done
        while True:
            try:
                ended = done > begun and self._finish_step(workers, done)
                steps_done = done if ended else self._fill(workers, done)
                self._collect_all(workers)
                self.saves.finish(workers, self.job.train.message_timeout_s)
                done = steps_done
                if steps_done < self.job.train.steps:
                    self._leaving.let_go(workers, done, self.log)
                if not self.saves.overdue:
                    return steps_done
            except RECOVERABLE as error:
                if self.in_place is None:
                    raise
                done = self._recover(workers, self.in_place, error, done)

    def _recover(self, workers: WorkerGroup, in_place: InPlace, error: Exception, known: int) -> int:
        """Replace the workers that died; return the number of steps done, all of them collected; ``known`` ones are."""
        lost = in_place.part(workers, error)
        left_out = self.checkpoints.left_out
        recovered = in_place.from_twins(workers, self.running, lost, error, self._measures, left_out)
        if recovered is None:
            return self._go_back(workers, in_place, lost, error, known)
        done = recovered.done
        while self._pending:
            ticket = self._pending[0]
            results = outcomes(ticket.refs)
            reports = ticket.reports(results)
            self.saves.heard(reports)
            self.copies.heard(reports)
            if ticket.kind == "step":
                self._collect_known(ticket, results, recovered, error)
            elif ticket.step > done or ticket.kind == "copy":
                pass  # it is queued again
            elif None not in results:
                self._collect(workers, ticket)
            elif ticket.kind == "save" and not (ticket.save is None or ticket.save.best):
                self.saves.uncollected(ticket.step, done)
            elif ticket.step < done:  # nobody has the parameters of that step any more
                raise error
            self._pending.popleft()
        if self.saves.lost(lost.dead):
            raise error
        self._unread = None
        self._pause()
        self._tell("recovered", done, lost.event(workers, recovered.from_pool, recovered.repeated, "replica"))
        return done

    def _tell(self, name: str, step: int, fields: dict[str, Any]) -> None:
        self.log.event(name, step=step, **fields)
        self.metrics.event(name, fields)

    def _go_back(self, workers: WorkerGroup, in_place: InPlace, lost: LostWorkers, error: Exception, known: int) -> int:
        """Go on from the newest copies in the nodes' memory, or a newer checkpoint, with others in place of the dead.

        Args:
            workers: the worker group, in which the replacements take the places of the dead.
            in_place: replaces them.
            lost: the result of its ``part``.
            error: the failure that was noticed.
            known: a number of steps that are done and collected.

        Returns the number of steps done.

        Raises:
            Exception: ``error``, where there is no copy.
        """
        while self._pending and None not in outcomes(self._pending[0].refs):
            self._collect_oldest(workers)
        for ticket in self._pending:
            reports = ticket.reports(outcomes(ticket.refs))
            self.saves.heard(reports)
            self.copies.heard(reports)
        running = any(ticket.kind == "step" for ticket in self._pending)
        copy: Checkpoint | None = self.copies.newest(max(known, self.results.steps), lost.dead)
        if copy is None or self.saves.lost(range(len(workers.actors))):
            raise error
        self.saves.poll()
        newest, folder = self.checkpoints.newest
        saved = folder is not None and newest > copy.step
        if saved:
            assert folder is not None
            try:
                copy = open_checkpoint(folder)
            except CheckpointError:  # a restart finds an earlier one
                raise error from None
        done = copy.step
        from_pool = in_place.replace(workers, lost, done, error)
        repeated = self._repeat_from(workers, folder if saved else copy, done, left_out_of(copy))
        source = "checkpoint" if saved else "neighbour"
        self._tell("recovered", done, lost.event(workers, from_pool, repeated + running, source))
        return done

    def _collect_known(
        self, ticket: Ticket, results: Sequence[Sequence[StepResult] | None], recovered: Recovered, error: Exception
    ) -> None:
        """Collect the steps of a call that count, some of whose results may have been lost.

        Raises:
            Exception: ``error``, where not even the other devices know of one of them.
        """
        for one in ticket.steps(results):
            if one.step > recovered.done:
                return  # it is queued again
            facts = recovered.facts.get(one.step - 1)
            if None not in one.results:
                self._collect_step(ticket, one)
            elif facts is not None:
                self._collect_step(ticket, one._replace(results=[*completed(one.results, facts)]), timed=False)
            elif one.step < recovered.done:
                raise error

    def _pause(self) -> None:
        """Note that the next step follows no other, and may take another time."""
        self.clock.pause()
        self._per_call.forget()
        self.results.pause()

    def _stops(self, stop: Stop | None, done: int) -> bool:
        """Log that the run ends early, after ``done`` steps, if it was asked to; return whether it was."""
        if stop is not None and done < self.job.train.steps:
            fields = {"step": done, "message": stop.why}
            if stop.interrupts:
                self.interrupted = fields
            elif stop.pauses:
                self.paused = fields
            else:
                self.log.event("early_stop", **fields)
        return stop is not None

    def _finish_step(self, workers: WorkerGroup, done: int) -> bool:
        """Queue again what was to follow a step and was not collected; return whether the run ends there."""
        stop = asked_to_stop(self.directory)
        self._queue_after(workers, done, self._dues.after(done, stop))
        return self._stops(stop, done)

    def _fill(self, workers: WorkerGroup, done: int) -> int:
        """Queue all calls of the run, collecting the oldest ones meanwhile.

        Returns the number of steps done when all queued calls have finished.
        """
        train = self.job.train
        fills, queued = True, done
        while queued < train.steps:
            if self.patience is not None and self.patience.exhausted:
                break
            if self._leaving:
                self._queue_after(workers, queued, Due(evaluates=False, saves=True, copies=False))
                break
            stop = asked_to_stop(self.directory)
            most = 1 if self._reads_later(workers) else self._per_call.most
            parts, due = self._dues.next_call(queued, most, fills, self.schedule.versions == "flush", stop)
            fills = due.anything
            self._take_next_plan(workers, queued)
            self._swap.before_step(workers, queued)
            steps = range(queued, queued + len(parts))
            orders = self._orders.of(self.running, steps, self.checkpoints.left_out, self._per_call.step_s)
            refs = workers.call("run_steps", queued, parts, *([orders] if orders else []))
            queued += len(parts)
            ticket = Ticket("step", queued, refs, self.clock, parts)
            self._pending.append(ticket)
            self._read(workers)
            if self._reads_later(workers):
                self._unread = ticket
            if due.anything:
                self._read(workers)
            self._queue_after(workers, queued, due)
            while sum(t.kind == "step" for t in self._pending) > QUEUED_CALLS:
                self._collect_oldest(workers)
            if self._stops(stop, queued):
                break
        return queued

    def _reads_later(self, workers: WorkerGroup) -> bool:
        """Return whether the results of a step have to be asked for; see ``_read``."""
        return self.running.plan.parallel.late_updates or not workers.on_cpus()

    def _queue_after(self, workers: WorkerGroup, done: int, due: Due) -> None:
        """Queue the validation and the save after ``done`` steps, unless they have been collected before."""
        train = self.job.train
        evaluates, saves, copies = due
        if evaluates and self._validated < done:
            metrics = self.results.validation_metrics
            keeps = () if metrics is None else (True, metrics.preprocess)
            refs = [ref for batch in range(train.eval_batches) for ref in workers.call("evaluate", batch, *keeps)]
            self._pending.append(Ticket("eval", done, refs, self.clock))
        val_loss, score, best = None, None, False
        if evaluates and train.keeps_best:
            # Whether to save depends on the validation loss, and only the validated parameters may be saved, so
            # nothing is queued until it is known. The devices wait for the driver once per validation.
            self._collect_all(workers)
            if self._to_save is None or self._to_save[0] != done:
                loss, result = self.results.newest["val_loss"], self.results.score
                self._to_save = (done, loss, result, self.checkpoints.improves(result))
            _, val_loss, score, best = self._to_save
            saves = saves or best or (self.patience is not None and self.patience.exhausted)
        if saves and self.saves.newest < done:
            save, refs = self.saves.call(workers, done)
            save.val_loss, save.score, save.best = val_loss, score, best
            self._pending.append(Ticket("save", done, refs, self.clock, save=save))
        elif copies:
            refs = self.copies.call(workers, done, self.checkpoints.left_out)
            self._pending.append(Ticket("copy", done, refs, self.clock))

    def _read(self, workers: WorkerGroup) -> None:
        """Ask for the result of the newest step, which a GPU has only been given when ``run_step`` returns, and of
        which a run without a barrier still makes the updates.

        That is done when the next step has been queued, so that the host's wait for one step falls into the next.
        """
        if self._unread is not None:
            self._unread.refs = workers.call("result", self._unread.step - 1)
            self._unread = None

    def _collect_all(self, workers: WorkerGroup) -> None:
        while self._pending:
            self._collect_oldest(workers)

    def _collect_oldest(self, workers: WorkerGroup) -> None:
        self._collect(workers, self._pending[0])
        self._pending.popleft()  # not before: where that fails, it is still to be collected

    def _collect(self, workers: WorkerGroup, ticket: Ticket) -> None:
        results = workers.answers(ticket.refs, self.job.train.message_timeout_s)
        if ticket.kind == "step":
            reports = ticket.reports(results)
            self.saves.heard(reports)
            self.copies.heard(reports)
            self.saves.poll()
            for one in ticket.steps(results):
                self._collect_step(ticket, one)
            return
        if ticket.kind == "copy":
            self.copies.begun(ticket.step, results)
            self.saves.heard(results)
            return
        ticket.clock.pause()
        if ticket.kind == "eval":
            self.results.validation(ticket.step, results)
            self._validated = ticket.step
        elif ticket.save is not None:
            self.copies.heard(results)
            self.saves.begun(ticket.save, results, dict(self.results.newest))
            self.metrics.event("checkpoint_begun", {"stall_s": ticket.save.stall_s})

    def _collect_step(self, ticket: Ticket, done: DoneStep, timed: bool = True) -> None:
        """Take in a step of a call; ``timed``: all devices have reported the times of their tasks."""
        step, tensor = done.step, self.running.plan.parallel.tensor
        results = [one for one in done.results if one is not None]  # the caller has seen to it that none is lost
        self._swap.heard(step, results)
        self._leaving.heard(results)
        step_s = self.results.step(step, done.part, ticket.clock, results, tensor, timed)
        if step_s is not None and timed and ticket.clock is self.clock:  # not if it was queued before the plan changed
            self._per_call.took(step_s)
            self.copies.took(step_s)
            memory = [r.memory for r in results[::tensor]]
            loads = expert_loads(results[::tensor])
            self.controller.observe(MeasuredStep(step_s, memory, self.clock, expert_loads=loads))
            self._log_events(step)
            self.metrics.norm = self.norm
            prediction = self.clock.prediction
            self._live.write(
                prediction.timeline if prediction else None, self.clock.measured, self.clock.recorded, self.norm
            )

    def _take_next_plan(self, workers: WorkerGroup, step: int) -> None:
        """Switch to another plan from ``step`` on, if the controllers ask for one."""
        target = self.controller.next_plan()
        self._log_events(step)
        if target is None:
            return
        unchanged = target.schedule is self.schedule and target.ahead == self.running.ahead
        self.running, self.clock = target, StepClock(target.schedule)
        self._per_call.forget()
        if not unchanged:  # an unchanged plan is only measured again
            install(workers, target, self.controller.measures_memory)
        self._store_plan()

    def _log_events(self, step: int) -> None:
        events = self.controller.drain()
        for name, fields in events:
            self._tell(name, step, fields)
        if events:
            self._store_plan()

    def _store_plan(self) -> None:
        """Save the proven plan, which a restart begins with."""
        if self.controller.proven != self._stored:
            self._stored = self.controller.proven
            self._stored.save(self.directory / "plan.json")
