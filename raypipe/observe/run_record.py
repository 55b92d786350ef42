"""A run as its directory tells it, while it goes on or afterwards: its files and its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from raypipe.errors import SpecError
from raypipe.files import read_json, short
from raypipe.observe.run_dir import RECORD, is_run
from raypipe.observe.run_log import EVENTS, METRICS, read_rows, shape_words
from raypipe.observe.timelines import FILE as TIMELINE
from raypipe.plan.reasons import gib

PLAN = "plan.json"
OF_PLAN = ("schedule", "stages", "replicas", "microbatch")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run directory's files; what a run has not written yet is empty."""

    directory: Path
    job: dict[str, Any]
    plan: dict[str, Any]
    timelines: dict[str, Any]
    """``predicted`` and ``measured``, as ``observe.timelines`` writes them."""
    steps: list[dict[str, Any]]
    """The step rows of metrics.jsonl."""
    validations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    damaged: tuple[str, ...]
    """Files that exist but cannot be read, with the reason."""

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job.get("name") or self.directory.name)

    @property
    def planned_steps(self) -> int | None:
        """``train.steps`` of the job; None where its model is served, and clients say when it ends."""
        if self.last("serving") is not None:
            return None
        steps = _section(self.job, "train").get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def parallel(self) -> dict[str, Any]:
        """The ``parallel`` section of the plan."""
        return _section(self.plan, "parallel")

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the newest event of a kind."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def state(self) -> str:
        """Return what the run is doing, by its last decisive event: ``finished``, ``failed``, ``running`` and so on."""
        words = {
            "finished": "finished",
            "interrupted": "interrupted",
            "failed": "failed",
            "error": "failed",
            "restarted": "restarting",
            "started": "running",
            "run": "starting",
            "waiting": "waiting for devices",
            "resized": "restarting with another plan",
        }
        return next((words[e["event"]] for e in reversed(self.events) if e["event"] in words), "not started")

    def summary(self) -> dict[str, Any]:
        """Return the figures that ``raypipe train --json`` prints for the run."""
        plan = {key: self.parallel.get(key) for key in OF_PLAN}
        made_for = _section(self.plan, "made_for").get("device")
        text = _section(self.job, "data").get("type") in (None, "bytes", "text")
        units = Units() if text else Units("", "tokens or samples")
        return summarise(self.directory, plan, self.plan.get("predicted_step_s"), made_for, units)


@contextmanager
def as_runs_write(directory: Path) -> Iterator[None]:
    """Make one error of what a value of another kind causes in the block, which shows the files of a run directory.

    Raises:
        SpecError: the block raised such an exception.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"its files hold a value that no run writes ({type(error).__name__}: {short(str(error))})"
        raise SpecError(str(directory), why, "restore the file from a copy, or look at another run") from error


def read_run(directory: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        SpecError: there is no run in it.
    """
    if not directory.is_dir():
        raise SpecError(str(directory), "there is no such folder", "give the run directory that raypipe train printed")
    try:
        found = is_run(directory)
    except OSError as error:
        raise SpecError(str(directory), f"can't be read: {error.strerror}", "give a folder that you may read") from None
    if not found:
        raise SpecError(str(directory), "holds no run", "give the run directory that raypipe train printed")
    damaged: list[str] = []

    def read(name: str) -> dict[str, Any]:
        try:
            value = read_json(directory / name)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            damaged.append(f"{name}: {error}")
            return {}
        if not isinstance(value, dict):
            damaged.append(f"{name}: is not an object")
            return {}
        return value

    job, plan, timelines = read(RECORD), read(PLAN), read(TIMELINE)
    rows = read_rows(directory / METRICS)
    return RunRecord(
        directory,
        job,
        plan,
        timelines,
        _steps(rows),
        [r for r in rows if "val_loss" in r],
        read_rows(directory / EVENTS),
        tuple(damaged),
    )


def _section(of: dict[str, Any], key: str) -> dict[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}


def model_name(row: dict[str, Any]) -> str:
    """Return a short name of the model that a row of a served run is of: some of its client's session, and its number.

    >>> model_name({"model": "5d2c9f0e:train:1"})
    '5d2c9f:1'
    """
    session, _, number = row["model"].split(":")
    return f"{session[:6]}:{number}"


def by_model(steps: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each model of a served run, the one that was updated last at the end; those of a training
    run under no name."""
    result: dict[str, list[dict[str, Any]]] = {}
    for row in steps:
        name = model_name(row) if "model" in row else ""
        result[name] = [*result.pop(name, ()), row]
    return result


class MemoryRow(NamedTuple):
    """One device, or with tensor parallelism one rank of it."""

    name: str
    planned_bytes: float | None
    """Of the planner's prediction; None if the plan was given."""
    measured_bytes: float | None
    """Peak of the whole run; None until the run has finished."""
    limit_bytes: float | None


def memory_rows(run: RunRecord) -> list[MemoryRow]:
    """Return a row per rank; empty if memory was neither planned nor measured.

    The planner predicts every rank; those of a run whose devices came or went are taken round and round.
    """
    decision, finished = run.last("planned") or {}, run.last("finished") or {}
    chosen: dict[str, Any] = next(iter(decision.get("candidates") or []), {})
    planned, measured = chosen.get("memory_bytes") or [], finished.get("memory_bytes") or []
    tensor = run.parallel.get("tensor") or 1
    count = len(measured) or len(planned)
    rows = []
    for rank in range(count):
        device = rank // tensor
        name = f"device {device}" + (f", tensor rank {rank % tensor}" if tensor > 1 else "")
        expected = planned[rank % len(planned)] if planned else None
        rows.append(MemoryRow(name, expected, measured[rank] if measured else None, chosen.get("capacity_bytes")))
    return rows


def comparison_lines(run: RunRecord) -> list[str]:
    """Return step time, bubbles and peak memory, predicted and measured; what is not known is left out."""
    summary, predicted = run.summary(), run.last("predicted") or {}
    lines = [f"run              {run.name}: {run.state()}, {summary['steps']} steps"]
    if (measured_s := summary["measured_step_s"]) is not None:
        lines.append(f"step measured    {measured_s:.4f} s (median)")
        for word, value in (("planned", run.plan.get("predicted_step_s")), ("predicted", predicted.get("step_s"))):
            if value is not None:
                lines.append(f"step {word:<11} {value:.4f} s ({value / measured_s - 1:+.1%})")
        beside = f" (predicted {predicted['bubble_ratio']:.1%})" if predicted.get("bubble_ratio") is not None else ""
        lines.append(f"bubbles          {summary['bubble_ratio']:.1%}{beside}")
    for row in memory_rows(run):
        known = [
            f"{gib(size)} {word}"
            for size, word in ((row.planned_bytes, "planned"), (row.measured_bytes, "measured"))
            if size is not None
        ]
        lines.append(f"{row.name:<16} {', '.join(known)}")
    return lines


STEP = {"loss", "step_s", "tokens_per_s", "bubble_ratio"}
"""Keys of a step's row; a row that lacks one is damaged."""
STREAMED = Path("data", "documents.json")
"""File of a run that streams its data."""
WORTH_SAYING = 0.1
"""Waits for a core above this share of the time are reported; daemons of the machine cause less."""
WORTH_NAMING = 0.005
"""Share of a step from which on a wait for data is named even where data are not streamed."""
WARM_STEPS = 2
"""Steps at the start of an attempt that medians leave out."""


class Units(NamedTuple):
    """The units of a run's figures; the defaults are those of text."""

    loss: str = "nats per token"
    throughput: str = "tokens"
    """``tokens``, or ``samples`` if samples are not known to be sequences of tokens."""


OF_TEXT = Units()


def summarise(
    directory: Path,
    plan: dict[str, Any],
    planned_step_s: float | None = None,
    planned_on: str | None = None,
    units: Units = OF_TEXT,
) -> dict[str, Any]:
    """Return the object that ``raypipe train --json`` prints (CONTRACT.md); figures that do not exist are None.

    Its ``predicted_step_s`` is ``planned_step_s`` or, if that is None, ``calibrated_step_s``: the schedule simulated
    with the task times of the first steps.

    Args:
        directory: the run directory.
        plan: schedule, stages, replicas and micro-batch size of the plan.
        planned_step_s: the plan's prediction, made before the run, in seconds; None if there is none.
        planned_on: the device for which that prediction was made; the run may use another one.
        units: units of loss and throughput.
    """
    rows, events = read_rows(directory / METRICS), read_rows(directory / EVENTS)
    steps = _steps(rows)
    starts = [i for i, e in enumerate(events) if e["event"] == "started"]
    first_of_run = max((i for i, e in enumerate(events) if e["event"] == "run"), default=0)
    this_run = events[first_of_run:]
    run = next((e for e in this_run if e["event"] == "run"), {})
    resumed_from = next((e["resumed_from"] for e in this_run if e["event"] == "started"), None)
    begun = {(events[i].get("resumed_from") or 0) for i in starts}
    warm = {b + k for b in begun for k in range(1, WARM_STEPS + 1)}
    timed = [r for r in steps if r["step"] not in warm] or steps
    predicted = [e["step_s"] for e in this_run if e["event"] == "predicted"]
    finished = [e for e in this_run if e["event"] == "finished"]
    step_s = _middle(r["step_s"] for r in timed)
    newest: dict[str, Any] = next((r for r in reversed(rows) if "val_loss" in r), {})
    val_metrics = {k.removeprefix("val_"): value for k, value in newest.items() if k not in ("step", "val_loss")}
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "loss": steps[-1]["loss"] if steps else None,
        "val_loss": newest.get("val_loss"),
        **({"val_metrics": val_metrics} if val_metrics else {}),
        "loss_unit": units.loss,
        "best": _best(rows, events),
        "stopped_early": next((e["message"] for e in this_run if e["event"] == "early_stop"), None),
        "losses": [r["loss"] for r in steps],
        "step_s_median": step_s,
        "tokens_per_s": _middle(r["tokens_per_s"] for r in timed),
        "throughput_unit": units.throughput,
        "bubble_ratio": _middle(r["bubble_ratio"] for r in timed),
        "data_wait_share": _middle(r.get("data_wait_share", 0.0) for r in timed),
        # Of the most uneven layer, max / mean; only where copies divide experts.
        "expert_load": _middle(max(r["expert_load"].values()) for r in timed if r.get("expert_load")),
        "streams_data": (directory / STREAMED).exists(),
        "plan": plan,
        "planned": _planned(events),
        "predicted_step_s": planned_step_s if planned_step_s is not None else (predicted[-1] if predicted else None),
        "calibrated_step_s": predicted[-1] if predicted else None,
        "planned_on": planned_on,
        "devices": next((e.get("devices") for e in reversed(this_run) if e["event"] in ("resized", "run")), None),
        "cores": run.get("cores"),
        "measured_step_s": step_s,
        "resumed_from": resumed_from,
        "counts": finished[-1]["counts"] if finished else None,
        "recoveries": sum(e["event"] in ("restarted", "recovered", "paused") for e in this_run),
        "recovery": _recovery(this_run),
        "skipped_steps": len({e["step"] for e in this_run if e["event"] == "skipped"}),
        "rewinds": sum(e["event"] == "rewound" for e in this_run),
        "checkpoint_stall_s": _middle(e["stall_s"] for e in this_run if e["event"] == "checkpoint" and "stall_s" in e),
        "run_dir": str(directory),
    }


def _steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of steps; the others are of validations, or damaged."""
    return [r for r in rows if "val_loss" not in r and r.keys() >= STEP]


def _middle(values: Iterable[float]) -> float | None:
    """Return the median; None if there are none."""
    each = list(values)
    return median(each) if each else None


def _recovery(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Recoveries in order: the step after which the run went on, how, the seconds it took, and the ranks replaced.

    A restart from a checkpoint, also with a plan for other devices, takes from the failure, or the pause, to when all
    workers have been set up again; None if it never came to that. Ranks whose process lived on are not replaced.
    """
    found: list[dict[str, Any]] = []
    processes: list[tuple[Any, Any]] = []
    """Node and process id by rank."""
    failed: float | None = None
    how = "checkpoint"
    for e in events:
        kind = e["event"]
        if kind == "recovered":
            own = {key: e[key] for key in ("seconds", "steps_repeated")}
            found.append({"step": e["step"], "kind": e.get("source", "replica"), **own, "replaced": e["ranks"]})
            for rank, pid in zip(e["ranks"], e.get("pids", ()), strict=False):
                processes[rank] = processes[rank][0], pid
        elif kind == "failed":
            failed = e.get("time")
        elif kind == "restarted":
            own = {"step": e.get("step"), "seconds": None, "steps_repeated": e.get("steps_repeated")}
            found.append(own | {"kind": e.get("source", how) if how == "checkpoint" else how, "replaced": []})
            how = "checkpoint"
        elif kind == "paused":
            failed = e.get("time")
            found.append({"step": e["step"], "kind": "replan", "seconds": None, "steps_repeated": 0, "replaced": []})
        elif kind == "resized":
            how = "replan" if e["devices"] != e["was"] else "checkpoint"
        elif kind == "started":
            before, processes = processes, [(at.get("node"), at.get("pid")) for at in e["devices"]]
            if found and found[-1]["kind"] != "replica" and found[-1]["seconds"] is None:
                new = [rank for rank, at in enumerate(processes) if at[1] is None or at not in before]
                found[-1]["replaced"] = new
                found[-1]["seconds"] = e["time"] - failed if failed is not None else None
    return found


def _best(rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Step and validation loss of the best checkpoint, if one is kept."""
    losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    steps = [e["step"] for e in events if e["event"] == "checkpoint" and e.get("best") and e["step"] in losses]
    return {"step": steps[-1], "val_loss": losses[steps[-1]]} if steps else None


def _planned(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The planner's prediction for the chosen plan, and the next best plan that fits."""
    decision = next((e for e in reversed(events) if e["event"] == "planned"), None)
    if decision is None:
        return None
    best, *others = decision["candidates"]
    keys = ("schedule", "stages", "replicas", "microbatch", "predicted_step_s", "why")
    second = next(({key: row[key] for key in keys} for row in others if row["fits"]), None)
    step_s = best["predicted_step_s"]
    compute_s = step_s * (1 - best["bubble_ratio"])
    return {"step_s": step_s, "compute_s": compute_s, "searched": decision["searched"], "next": second}


def summary_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the final summary."""
    lines = [
        f"{shape_words(result['plan'])}: {result['steps']} steps",
        f"training loss    {result['loss']:.4f}",
    ]
    if result["val_loss"] is not None:
        lines.append(f"validation loss  {result['val_loss']:.4f} {result['loss_unit']}")
    lines += [f"{'validation ' + name:<16} {value:.4g}" for name, value in result.get("val_metrics", {}).items()]
    for key, words in (("skipped_steps", "steps skipped   "), ("rewinds", "rewinds         ")):
        if result.get(key):
            lines.append(f"{words} {result[key]}: a loss or a gradient was not finite")
    if result["best"] is not None:
        lines.append(
            f"best checkpoint  step {result['best']['step']}, validation loss {result['best']['val_loss']:.4f}"
        )
    if result["stopped_early"] is not None:
        lines.append(f"stopped early    {result['stopped_early']}")
    lines.append(f"{result['throughput_unit'] + ' per s':<16} {result['tokens_per_s']:,.0f}")
    if result["planned"] is not None:
        lines.append(_choice(result["planned"], result["measured_step_s"], result["bubble_ratio"]))
    elif result["predicted_step_s"] != result["calibrated_step_s"]:
        error = result["predicted_step_s"] / result["measured_step_s"] - 1
        where = f", for {result['planned_on']}" if result["planned_on"] is not None else ""
        lines.append(f"step planned     {result['predicted_step_s']:.4f} s ({error:+.1%}){where}")
    lines.append(f"step measured    {result['measured_step_s']:.4f} s (median), {result['bubble_ratio']:.1%} idle")
    waited = result.get("data_wait_share") or 0.0
    if result.get("streams_data") or waited >= WORTH_NAMING:
        lines.append(f"data wait        {waited:.2%} of the step (median)")
    if result["calibrated_step_s"] is not None:
        error = result["calibrated_step_s"] / result["measured_step_s"] - 1
        lines.append(
            f"step predicted   {result['calibrated_step_s']:.4f} s ({error:+.1%}), from task times at the start"
        )
    if (shared := _shared(result["devices"], result["cores"], result.get("core_wait"))) is not None:
        lines.append(f"cores            {shared}")
    if result["recoveries"]:
        lines.append(f"recoveries       {result['recoveries']}{_of_them(result.get('recovery'))}")
    lines.append(f"run directory    {result['run_dir']}")
    return lines


def _of_them(recovery: list[dict[str, Any]] | None) -> str:
    """How many recoveries were in place, and how long they took."""
    in_place = [one for one in recovery or () if one["kind"] == "replica"]
    if not in_place:
        return ""
    repeated = sum(one["steps_repeated"] for one in in_place)
    return (
        f", {len(in_place)} of them in place, {median(one['seconds'] for one in in_place):.1f} s each (median), "
        f"{repeated} step{'s' * (repeated != 1)} repeated"
    )


def _shared(devices: int | None, cores: int | None, waited: float | None) -> str | None:
    """A sentence on devices that waited for a core, which makes steps longer than predicted; None if none did."""
    crowded = devices is not None and cores is not None and devices > cores
    if not crowded and (waited is None or waited <= WORTH_SAYING):
        return None
    whose = f"{devices} devices shared {cores}" if crowded else "other processes used them"
    return whose if waited is None else f"{whose}: a device waited for one {waited:.0%} of the time"


def _choice(planned: dict[str, Any], measured_s: float, bubble_ratio: float) -> str:
    """Compare the planner's prediction with the measured step, for the whole step and for compute only."""
    compute = planned["compute_s"] / (measured_s * (1 - bubble_ratio)) - 1
    line = f"step planned     {planned['step_s']:.4f} s ({planned['step_s'] / measured_s - 1:+.1%}"
    line += f"; compute only {compute:+.1%})"
    line += f", the best of {planned['searched']} candidates"
    second = planned["next"]
    if second is None:
        return line
    shape = f"{second['schedule']}, {second['stages']} x {second['replicas']}, micro-batches of {second['microbatch']}"
    return f"{line}; next: {shape}, {second['why']}"
