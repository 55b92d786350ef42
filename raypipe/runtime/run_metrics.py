"""A run's results: what devices report of steps and validations, checked, put together, logged, exported as metrics.

Metrics are exported through Ray from the driver's process; what they are is in ``observe/metrics.py``.

The driver notes what the devices report with every step, and a thread beside it sets the metrics: no step waits for
them and no message is sent for them. The thread sets all of them again and again, about once a second and for no more
than ``SHARE`` of the time, because Ray drops a gauge that nobody has set for a while, even one that has not changed.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ray.util import metrics as ray_metrics

from raypipe.data import known_fields, tokens_per_sample, validation_weights
from raypipe.explain.causes import explain
from raypipe.explain.measured import Measured
from raypipe.explain.replay import CAUSES, Replay
from raypipe.job.cluster import peak_flops_s
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.observe import metrics as declared
from raypipe.observe.metrics import DURATION_BUCKETS, METRICS, RUN_TAGS, Metric, Reading, device_readings, step_readings
from raypipe.observe.run_log import EVENTS, RunLog, events_since_start, read_rows
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.recorded_steps import FEWEST
from raypipe.plan.online.sequence import Guard
from raypipe.plan.plan import Plan
from raypipe.runtime.early_stop import Patience, score
from raypipe.runtime.executor.metrics import PREFIX, ValidationMetrics
from raypipe.runtime.executor.step import StepResult, check_samples, communication_counts, expert_loads, waits_of
from raypipe.runtime.recovery.nonfinite import NonFiniteError, NonFinitePolicy
from raypipe.runtime.setup.communicators import Location, sharers
from raypipe.runtime.update.norm import clip_factor, norm_of
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.norm_policy import NormPolicy

EVERY_S = 1.0
SHARE = 0.005
"""Of one core's time, at most."""
EXPLAINED_EVERY_S = 15.0
"""Shortest time between two explanations of where a step's time goes."""
EXPLAINED_TASKS = 10_000
"""Most tasks of the steps that are explained for metrics: half a second of the driver's processor, beside training."""
LONG_RUN_S = 60.0
"""A run of that length may end some seconds later."""
RAYS_INTERVAL = "RAY_metrics_report_interval_ms"
USUAL_INTERVAL_S = 10.0
LONGEST_INTERVAL_S = 600.0
"""What is set above that is not waited for."""
EXPORTING = "exporting metrics"
GIB = 2**30
WARM_UP = 2
"""Steps after which the memory of a GPU is what it will be: state of optimizers and pools of graphs are there."""
NEAR = 0.03
"""Share by which memory may miss the plan before it is said."""
BACKWARD = 2.0
"""Operations of a backward in those of its forward, as MFU counts them (Chowdhery et al. 2022, PaLM, appendix B)."""


COUNTED = {
    "restarted": declared.RECOVERIES,
    "recovered": declared.RECOVERIES,
    "paused": declared.RECOVERIES,
    "replanned": declared.REPLANS,
    "skipped": declared.SKIPPED,
    "rewound": declared.REWINDS,
}
"""Events of events.jsonl, and the metrics that count them."""


class RunMetrics:
    """The metrics of one attempt at a run. Nothing that goes wrong here ends training: ``tell`` hears of it, once."""

    def __init__(self, job: JobSpec, plan: Plan, directory: Path, tell: Callable[[str], None]) -> None:
        self.job, self.directory = job, directory
        self.tensor, self.copies = plan.parallel.tensor, plan.parallel.replicas
        self._plan = plan
        self._guard = Guard(tell)
        self._exported: dict[str, Any] = {}
        self._held: dict[tuple[Metric, str], Reading] = {}
        """What does not come with every step, by metric and device."""
        self._newest: tuple[dict[str, Any], StepClock] | None = None
        """The newest step's row, and the clock that timed it."""
        self._counts = dict.fromkeys(COUNTED.values(), 0)
        self._flops_per_peak_s: float | None = None
        """Operations of a step over the peak of all devices: the shortest time that a step could take."""
        self._peak_bytes = 0
        self._sharers: list[int] = []
        self._tell = tell
        self._planned_bytes: tuple[float, ...] = ()
        """Of each device, on GPUs whose plan has them."""
        self._off: dict[int, float] = {}
        """Per device that has reported since its first steps, its memory over that planned, minus 1."""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun, self._diverged = time.monotonic(), False
        self.norm: NormPolicy = "none"
        """What updates do about the global gradient norm."""
        self._lost: list[Reading] = []
        self._explains_at = self._explaining_s = 0.0

    def begin(self, run_id: str, places: Sequence[Location]) -> None:
        """Before the first step; ``places`` are the workers', by rank. ``close`` ends it."""
        self._guard(EXPORTING, self._begin, run_id, places)

    def step(self, row: dict[str, Any], clock: StepClock, devices: Sequence[StepResult]) -> None:
        """A step is done: its row of metrics.jsonl, the clock that timed it, and what each device reports."""
        self._guard(EXPORTING, self._step, row, clock, devices)

    def figures(self, step_s: float, devices: Sequence[StepResult]) -> dict[str, float]:
        """Return what loggers get of the devices beside a step's row: MFU where their peak is known, and memory.

        Memory is the largest peak of any device, as far as they have reported it.
        """
        reported = [one.device_memory.peak for one in devices if one.device_memory is not None]
        self._peak_bytes = max([self._peak_bytes, *reported])
        result = {"memory_bytes": float(self._peak_bytes)} if self._peak_bytes else {}
        if self._flops_per_peak_s is not None:
            result["mfu"] = self._flops_per_peak_s / step_s
        return result

    def diverged(self) -> None:
        """Training has diverged: the loss is no longer a number."""
        self._newest, self._diverged = None, True
        self._hold([(declared.LOSS, math.nan, {})])

    def validation(self, loss: float) -> None:
        """A validation is done."""
        self._hold([(declared.VALIDATION_LOSS, loss, {})])

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Something that goes to events.jsonl has happened."""
        if name == "predicted":
            predicted = (declared.STEP_PREDICTED, "step_s"), (declared.BUBBLE_PREDICTED, "bubble_ratio")
            self._hold((metric, fields[key], {}) for metric, key in predicted)
        elif name == "checkpoint_begun":
            self._hold([(declared.CHECKPOINT_STALL, fields["stall_s"], {})])
        elif name == "straggler":
            self._hold([(declared.SLOWDOWN, fields["slowdown"], {"device": str(fields["device"])})])
        elif (counted := COUNTED.get(name)) is not None:
            self._counts[counted] += 1
            self._hold([(counted, float(self._counts[counted]), {})])

    def close(self) -> None:
        """The run is over: what is newest is set once more, and then nothing any longer.

        The end of a long run that has diverged waits until Ray has exported that, for whoever is to be woken by it.
        """
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
            self._guard(EXPORTING, self._set_all)
            if self._diverged and time.monotonic() - self._begun > LONG_RUN_S:
                time.sleep(export_interval_s() + EVERY_S)  # Ray exports nothing when a process ends

    def _hold(self, readings: Iterable[Reading]) -> None:
        with self._lock:
            for reading in readings:
                metric, _, tags = reading
                self._held[metric, tags.get("device", "")] = reading

    def _begin(self, run_id: str, places: Sequence[Location]) -> None:
        self._exported = exported(self.directory, run_id)
        self._sharers = sharers(places)
        peaks = [peak_flops_s(place.model, self.job.train.dtype) for place in places]
        known = [peak for peak in peaks if peak is not None]
        if len(known) == len(peaks):
            self._flops_per_peak_s = self._flops() / math.fsum(known)
        self._hold(self._planned(on_gpus=all(place.peer.device != "cpu" for place in places)))
        self._thread = threading.Thread(target=self._work, name="raypipe-metrics", daemon=True)
        self._thread.start()

    def _flops(self) -> float:
        """Operations of a step: one forward and one backward of every sample, whatever is computed again."""
        model = build_model(self.job, known_fields(self.directory / "data"), parallel=self._plan.parallel)
        row, data = self.job.train.microbatch_tokens, self.directory / "data"
        full = 1.0 if row == "auto" else tokens_per_sample(self.job, data) / row  # rows of documents are rarely full
        return (1.0 + BACKWARD) * self.job.train.batch * math.fsum(model.flops) * full

    def _planned(self, on_gpus: bool) -> Iterable[Reading]:
        """Yield what the run's events say of the plan and of what came before this attempt."""
        events = read_rows(self.directory / EVENTS)
        kinds = Counter(e["event"] for e in events_since_start(self.directory))
        self._counts = dict.fromkeys(COUNTED.values(), 0)
        for name, counted in COUNTED.items():
            self._counts[counted] += kinds[name]
        yield from ((metric, float(count), {}) for metric, count in self._counts.items())
        if self._plan.predicted_step_s is not None:
            yield declared.STEP_PREDICTED, self._plan.predicted_step_s, {}
        planned = next((e["candidates"][0] for e in reversed(events) if e["event"] == "planned"), None)
        p = self._plan.parallel
        if planned is None or any(planned[key] != getattr(p, key) for key in ("schedule", "stages", "microbatch")):
            return
        yield declared.BUBBLE_PREDICTED, planned["bubble_ratio"], {}
        if on_gpus:  # the processes of CPUs keep what they have freed
            self._planned_bytes = tuple(planned["memory_bytes"][:: self.tensor])
        for device, held in enumerate(planned["memory_bytes"][:: self.tensor]):
            yield declared.MEMORY_PLANNED, held, {"device": str(device)}

    def _step(self, row: dict[str, Any], clock: StepClock, devices: Sequence[StepResult]) -> None:
        self._exported[declared.STEP_DURATION.name].observe(row["step_s"])
        for i, one in enumerate(devices):
            if (held := one.device_memory) is not None:
                tags = {"device": str(i)}
                limit = held.limit / self._sharers[i * self.tensor]
                self._hold([(declared.MEMORY, held.peak, tags), (declared.MEMORY_LIMIT, limit, tags)])
                if self._planned_bytes and row["step"] > WARM_UP and len(self._off) < len(devices):
                    planned = self._planned_bytes[i]
                    self._off[i] = held.peak / self._sharers[i * self.tensor] / planned - 1
                    self._say_if_off(len(devices))
        self._newest = row, clock

    def _say_if_off(self, devices: int) -> None:
        """Say where the memory of GPUs is not what was planned, once all have reported."""
        device, off = max(self._off.items(), key=lambda one: abs(one[1]))
        if len(self._off) < devices or abs(off) <= NEAR:
            return
        planned = self._planned_bytes[device]
        self._tell(
            f"device {device} has {planned * (1 + off) / GIB:.2f} GiB of its GPU taken, {off:+.0%} of the "
            f"{planned / GIB:.2f} GiB planned: such plans need {'more' if off > 0 else 'less'} memory than predicted"
        )

    def _work(self) -> None:
        pause = 0.0
        while not self._ends.wait(pause):
            begun, explaining = time.thread_time(), self._explaining_s
            self._guard(EXPORTING, self._set_all)
            took_s = time.thread_time() - begun - (self._explaining_s - explaining)
            pause = max(EVERY_S, took_s / SHARE)

    def _lost_seconds(self, clock: StepClock) -> list[Reading]:
        """Seconds of a step that are lost, by cause; found anew now and then, and 0 for a cause that is gone."""
        recorded = clock.recorded
        if time.monotonic() < self._explains_at or recorded is None or len(recorded.steps) < FEWEST:
            return self._lost
        of = Measured(schedule=recorded.schedule, steps=tuple(recorded.steps), norm=self.norm)
        if sum(len(t) for t in of.steps[0].times) * len(of.steps) > EXPLAINED_TASKS:
            return []
        begun = time.thread_time()
        lost = dict.fromkeys(CAUSES, 0.0) | {one.cause: one.seconds for one in explain(Replay(of)).causes}
        self._lost = [(declared.LOST, seconds, {"cause": cause}) for cause, seconds in lost.items()]
        took_s = time.thread_time() - begun
        self._explaining_s += took_s
        self._explains_at = time.monotonic() + max(EXPLAINED_EVERY_S, took_s / SHARE)
        return self._lost

    def _set_all(self) -> None:
        with self._lock:
            readings = list(self._held.values())
        if (newest := self._newest) is not None:
            row, clock = newest
            readings += step_readings(row, self.job.train.batch)
            readings += self._lost_seconds(clock)
            if self._flops_per_peak_s is not None:
                readings.append((declared.MFU, self._flops_per_peak_s / row["step_s"], {}))
            if (timeline := clock.measured()) is not None:
                readings += device_readings(timeline, row["step_s"], self.copies)
        for metric, value, tags in readings:
            self._exported[metric.name].set(value, tags)


def exported(directory: Path, run_id: str) -> dict[str, Any]:
    """Return Ray's gauge or histogram of every metric, by name, with a run's tags."""
    name = directory.name.encode("ascii", "backslashreplace").decode()  # Ray's tags are ASCII
    tags, result = dict(zip(RUN_TAGS, (name, run_id, name), strict=True)), {}
    for metric in METRICS:
        keys = (*RUN_TAGS, *metric.tags)
        one = (
            ray_metrics.Gauge(metric.name, metric.help, keys)
            if metric.kind == "gauge"
            else ray_metrics.Histogram(metric.name, metric.help, list(DURATION_BUCKETS), keys)
        )
        result[metric.name] = one.set_default_tags(tags)
    return result


def export_interval_s() -> float:
    """How often Ray exports what a process has set."""
    try:
        given = float(os.environ[RAYS_INTERVAL]) / 1000.0
    except (KeyError, ValueError):
        return USUAL_INTERVAL_S
    return given if 0 <= given <= LONGEST_INTERVAL_S else USUAL_INTERVAL_S


class RunResults:
    """The results of one attempt at a run, in the order of its steps.

    Args:
        job: the job.
        data: the run's prepared data.
        tokens_per_step: tokens of a mini-batch, or its samples where these are no tokens.
        log: gets a row for each step and validation.
        metrics: hear of them as well.
        nonfinite: what to do about a step whose loss or gradients are not finite.
    """

    def __init__(
        self,
        job: JobSpec,
        data: Path,
        tokens_per_step: float,
        log: RunLog,
        metrics: RunMetrics,
        nonfinite: NonFinitePolicy,
    ) -> None:
        self._job, self._data, self._train, self._tokens_per_step = job, data, job.train, tokens_per_step
        self._streams = job.data.type == "documents"
        self._log, self._metrics, self._nonfinite = log, metrics, nonfinite
        self.newest: dict[str, Any] = {}
        """The newest losses and figures of a validation."""
        self.counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "p2p": 0, "p2p_bytes": 0}
        """Number of messages, their bytes and the collectives between devices in the newest step."""
        self.patience: Patience | None = None
        """Told of every validation."""
        self.validation_metrics: ValidationMetrics | None = None
        """Computes more figures of a validation from its predictions."""
        self.score = math.inf
        """Score of the newest validation."""
        self._logged = 0
        """Number of steps done at the newest row of a step."""
        self._at = 0.0
        """When the newest step came."""

    @property
    def steps(self) -> int:
        """Number of steps done at the newest row of a step; 0 for none since the run began or went back."""
        return self._logged

    def forget(self) -> None:
        """Log steps again that come again, because the run has gone back and their rows are gone."""
        self._logged = 0

    def pause(self) -> None:
        """Note that the next step takes its time from now."""
        self._at = time.monotonic()

    def validation(self, step: int, results: Sequence[StepResult]) -> None:
        """Take in a validation after ``step`` steps; ``results`` are by batch, then by rank.

        Raises:
            NonFiniteError: its loss is not finite.
            SampleCountError: it covers other samples than it should.
            SpecError: the job's function for metrics fails, or does not return ``train.best_metric``.
        """
        batches = self._train.eval_batches
        check_samples(f"validation after step {step}", results, self._train.batch * batches)
        ranks = len(results) // batches
        by_batch = [results[k * ranks : (k + 1) * ranks] for k in range(batches)]
        weights = validation_weights(self._job, self._data)
        shares = [(weight / sum(weights), r) for weight, of in zip(weights, by_batch, strict=True) for r in of]
        loss = math.fsum(share * r.loss_sum for share, r in shares)
        if not math.isfinite(loss):
            raise NonFiniteError(step, f"the validation loss is {loss}")
        row = {"val_loss": loss}
        for name, value in ((PREFIX + name, share * value) for share, r in shares for name, value in r.figures):
            row[name] = row.get(name, 0.0) + value
        if self.validation_metrics is not None:
            kept = [[prediction for result in of for prediction in result.predictions] for of in by_batch]
            row = {**row, **self.validation_metrics.of(kept, self._job, self._data), "val_loss": loss}
        self.score = score(self._train, row)
        self.newest |= row
        self._log.metric({"step": step, **row})
        self._metrics.validation(loss)
        if self.patience is not None:
            self.patience.saw(step, self.score)

    def step(
        self, step: int, part: Part, clock: StepClock, results: Sequence[StepResult], tensor: int, timed: bool = True
    ) -> float | None:
        """Take in a step; return its time in seconds, or None if no device has made its update.

        Args:
            step: its number, from 1.
            part: how it began and ended.
            clock: times it.
            results: by rank.
            tensor: number of ranks of a device.
            timed: whether all devices have reported the times of their tasks.

        Raises:
            NonFiniteError: its loss or its gradients are not finite, and the run is not to go on with the next step.
            SampleCountError: it covers other samples than it should.
        """
        check_samples(f"step {step}", results, self._train.batch)
        loss = math.fsum(r.loss_sum for r in results)
        norm = norm_of(r.norm_squared for r in results)
        if not math.isfinite(norm):  # the loss may still be finite although the parameters no longer are
            of_loss = f"the training loss is {loss}"
            of_norm = f"the gradient norm is {norm}, the training loss {loss:.4f}"
            self._skipped(step, of_norm if math.isfinite(loss) else of_loss, clock)
            return None
        if not math.isfinite(loss):
            raise NonFiniteError(step, f"the training loss is {loss}")
        if results[0].optimistic and clip_factor(self._train.clip or math.inf, norm) < 1.0:
            self._log.event("undone", step=step, grad_norm=norm)
        for of in {of.stage: of for r in results for of in r.first_k}.values():
            self._log.event("first_k", step=step, stage=of.stage, k=of.k, most=of.most, bytes_by_k=of.peaks)
        # The tensor-parallel ranks of a device run in lockstep, so the times of the first one stand for all.
        devices = results[::tensor]
        if timed:
            step_s, bubble_ratio = clock.add(part, [r.times for r in devices], waits_of(devices), step)
            self.counts |= communication_counts(results, tensor)
        else:  # all of it counts as idle, because nearly all of it was
            step_s, bubble_ratio = max(1e-9, time.monotonic() - self._at), 1.0
        self.pause()
        self.newest |= {"loss": loss}
        if step <= self._logged:
            return step_s  # a recovery has repeated it: all devices had reported it, and none had made its update final
        self._logged = step
        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": learning_rate(self._train, step - 1),
            "step_s": step_s,
            "tokens_per_s": self._tokens_per_step / step_s,
            "bubble_ratio": bubble_ratio,
        }
        if self._streams:
            row["data_wait_share"] = max(r.data_wait_s for r in results) / step_s
        if loads := {path: own for path, own in expert_loads(devices).items() if own.any()}:
            row["expert_load"] = {path: float(own.max() / own.mean()) for path, own in loads.items()}
        if self._train.report_to:
            row |= self._metrics.figures(step_s, devices)
        self._log.metric(row)
        self._metrics.step(row, clock, devices)
        return step_s

    def _skipped(self, step: int, what: str, clock: StepClock) -> None:
        self._nonfinite.skip(step, what)
        clock.pause()
        self.pause()
        self._log.event("skipped", step=step, message=what)
        self._metrics.event("skipped", {})
