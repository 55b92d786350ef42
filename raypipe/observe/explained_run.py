"""From a run directory to the explanation of its newest steps: causes, a table, a heat map, one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from raypipe.cost.profile import Profile, load_profile
from raypipe.cost.sizes import times_at
from raypipe.errors import RaypipeError, SpecError
from raypipe.explain.causes import Explanation, Lost, explain
from raypipe.explain.changes import Change, ExplainedPlan, changes, profiled_costs
from raypipe.explain.measured import Measured, TaskTimes, task_times
from raypipe.explain.replay import MEANING, Replay
from raypipe.observe.run_dir import PROFILE
from raypipe.observe.run_record import PLAN, RunRecord
from raypipe.observe.tables import seconds, text_table
from raypipe.observe.timelines import FILE, lanes_of
from raypipe.plan.online.recorded_steps import RecordedSteps, recorded_from_json
from raypipe.plan.plan import Plan, load_plan
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import COMPUTE, Kind
from raypipe.schedule.lowering.norm_policy import NORM_POLICIES
from raypipe.schedule.passes.sync import BY_LAYER
from raypipe.schedule.verify import check_links
from raypipe.simulate.timeline import Timeline

NOTHING_BETTER = "nothing that was tried makes steps shorter"


@dataclass(frozen=True, slots=True)
class Explained:
    """An explanation, what to change, and what to know about both."""

    why: Explanation
    changes: tuple[Change, ...]
    """Best first."""
    schedule: Schedule
    steps: tuple[int, int]
    """First and last step that are explained."""
    timeline: Timeline
    """The newest step as measured."""
    notes: tuple[str, ...]

    @property
    def best(self) -> Change:
        """The change with the shortest predicted step; one that changes nothing if there is no better."""
        return self.changes[0] if self.changes else Change(NOTHING_BETTER, self.why.step_s, 0.0, "")

    def as_json(self) -> dict[str, Any]:
        """Return what ``raypipe explain --json`` prints."""
        return {
            "step_s": self.why.step_s,
            "ideal_s": self.why.ideal_s,
            "causes": [lost.as_json() for lost in self.why.causes],
            "best_change": self.best.as_json(),
            "changes": [change.as_json() for change in self.changes],
            "steps": list(self.steps),
            "devices": self.schedule.devices,
            "schedule": self.schedule.name,
            "notes": list(self.notes),
        }


def explain_run(run: RunRecord, profile: Path | None = None) -> Explained:
    """Explain the newest steps that a run has recorded.

    Args:
        run: the record of the run, which may still be at work.
        profile: what layers should cost; None for the profile in the run's directory, if there is one.

    Raises:
        SpecError: the run has recorded no steps, they cannot be read, or the profile is of another model.
    """
    where = str(run.directory / FILE)
    value = run.timelines.get("recorded")
    if value is None:
        if any(text.startswith(FILE) for text in run.damaged):
            raise SpecError(where, "is damaged, so there is nothing to explain", "run the job again")
        why = "holds no recorded steps: the run has not come so far, failed early, or was made by an earlier version"
        raise SpecError(where, why, "wait until a few steps have run one after another, or run the job again")
    recorded = recorded_from_json(value, where)
    notes: list[str] = []
    plan = _plan(run)
    known = _profile(run, profile)
    costs = None
    if plan is not None and known is not None:
        try:
            costs = task_times(recorded.schedule, profiled_costs(known, plan, recorded.schedule))
        except RaypipeError as error:
            if profile is not None:
                raise
            notes.append(f"the run's profile does not fit its plan, so it is not used: {error}")
    of = Measured(
        schedule=recorded.schedule,
        steps=tuple(recorded.steps),
        norm=_norm(value, where),
        planned=costs or {},
        earlier=_earlier(run.timelines.get("predicted")),
    )
    return explained(of, _planned(run, plan, known, of), [*notes, *_notes(run, recorded, costs is not None)])


def explained(of: Measured, planned: ExplainedPlan | None = None, notes: list[str] | None = None) -> Explained:
    """Explain measured steps, and find what to change.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    if of.schedule.versions == "flush":
        check_links(link(of.schedule))
    replay = Replay(of)
    result = explain(replay)
    counted = of.steps[replay.counted]
    return Explained(
        result,
        tuple(changes(result, replay, planned)),
        of.schedule,
        (counted[0].number, counted[-1].number),
        of.timeline(of.steps[-1]),
        tuple(notes or ()),
    )


def _norm(value: Mapping[str, Any], where: str) -> Any:
    norm = value.get("norm", "none")
    if norm not in NORM_POLICIES:
        raise SpecError(where, f"its recorded norm policy is {norm!r}", f"known: {', '.join(NORM_POLICIES)}")
    return norm


def _plan(run: RunRecord) -> Plan | None:
    try:
        return load_plan(run.directory / PLAN) if run.plan else None
    except SpecError:
        return None


def _profile(run: RunRecord, given: Path | None) -> Profile | None:
    if given is not None:
        return load_profile(given)
    path = run.directory / PROFILE
    try:
        return load_profile(path) if path.is_file() else None
    except SpecError:
        return None


def _planned(run: RunRecord, plan: Plan | None, profile: Profile | None, of: Measured) -> ExplainedPlan | None:
    train = run.job.get("train")
    batch = train.get("batch") if isinstance(train, dict) else None
    if plan is None or not isinstance(batch, int):
        return None
    layer_s = None
    if profile is not None and len(profile.layers) != sum(map(len, plan.cut)):
        profile = None
    if profile is not None:
        times = [times_at(layer, plan.parallel.microbatch) for layer in profile.layers]
        layer_s = tuple(t.forward + t.joint for t in times)
    return ExplainedPlan(plan=plan, batch=batch, clips=of.norm != "none", layer_s=layer_s, profile=profile)


def _earlier(step: Any) -> TaskTimes:
    """The task times of the run's own prediction, which are means of its first steps; nothing if there is none."""
    each: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for lane in lanes_of(step) or ():
        for task, start, end in lane:
            if task.kind in COMPUTE:
                each[task.kind, task.stage].append((end - start) / len(task.mbs))
    return {key: fmean(values) for key, values in each.items()}


def _notes(run: RunRecord, recorded: RecordedSteps, has_profile: bool) -> list[str]:
    result = []
    if len(recorded.steps) == 1:
        result.append("only one step was recorded, so what is between steps is not known")
    if run.parallel.get("sync") in BY_LAYER:
        result.append("with this parallel.sync, tasks wait inside for gradient sums: that is not told apart from work")
    if loads := run.steps[-1].get("expert_load") if run.steps else None:
        layer = max(loads, key=lambda path: loads[path])
        result.append(
            f"the busiest expert of {layer} gets {loads[layer]:.2f} times the mean in the newest step, and the copies "
            "wait for the one that holds it"
        )
    if run.parallel.get("side_stream") is not None:
        result.append("weight gradients run on a second stream, whose time is not told apart: theirs look like nothing")
    if recorded.schedule.replicas == 1 and not has_profile and recorded.schedule.devices > 1:
        result.append(
            "there is no profile and no second copy of a stage to compare with, so a device that was slow from the "
            "start looks like a large stage: give --profile to tell them apart"
        )
    return result


SHADES = " .:-=+*#%@"
"""From nothing to the largest of the map: plain characters, which every terminal and log file has."""
TOLD = 3
"""Causes that are told in words."""
MOST_ROWS = 64
"""Devices in the heat map; of more, the ones that lose most."""


def explanation_table(of: Explained) -> RenderableType:
    """Return everything there is to see."""
    why = of.why
    first, last = of.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lost = why.step_s - why.ideal_s
    share = f", {lost / why.step_s:.1%} of it lost" if why.step_s else ""
    title = f"{of.schedule.name} on {of.schedule.devices} devices, {steps}: {seconds(why.step_s)} a step, ideal "
    table = text_table(("cause", "where", "lost", "of the step", "mended alone"), left=("cause", "where"))
    for cause in why.causes:
        table.add_row(*cause_cells(of, cause))
    parts: list[RenderableType] = [Text(f"{title}{seconds(why.ideal_s)}{share}", style="bold"), table]
    parts += [Text(f"{cause.cause}: {MEANING[cause.cause]}", style="dim") for cause in why.causes[:TOLD]]
    parts += [Text(line, style="dim") for line in heat_map(of)]
    parts.append(Text(sentence(of), style="bold"))
    parts += [Text(f"or: {c.what} ({-c.gain:+.1%})", style="dim") for c in of.changes[1:4]]
    parts += [Text(f"note: {note}", style="dim") for note in of.notes]
    return Group(*parts)


def sentence(of: Explained) -> str:
    """Return what to do, in one sentence."""
    best = of.best
    if not of.changes:
        return f"Best change: {best.what}."
    return (
        f"Best change: {best.what}: {seconds(best.predicted_step_s)} a step instead of {seconds(of.why.step_s)} "
        f"({best.gain:.1%} less)."
    )


def cause_cells(of: Explained, one: Lost) -> list[str]:
    """Return a cause, where most of it is, its seconds and share of the step, and the step if it alone were mended."""
    place = "all devices" if one.device is None else f"{'link' if one.links else 'device'} {one.device}"
    lost = seconds(one.seconds) if one.seconds >= 0 else f"-{seconds(-one.seconds)}"
    share = f"{one.seconds / of.why.step_s:.1%}" if of.why.step_s else ""
    return [one.cause, place, lost, share, seconds(one.what_if_step_s)]


def most_lost(of: Explained) -> tuple[list[Lost], list[int], float]:
    """Return the causes of a heat map, its devices (of many, those that lose most), and the most that one loses."""
    causes = [cause for cause in of.why.causes if cause.seconds > 0 and cause.devices]
    totals = {d: sum(cause.devices.get(d, 0.0) for cause in causes) for d in range(of.schedule.devices)}
    shown = sorted(sorted(totals, key=lambda d: -totals[d])[:MOST_ROWS])
    return causes, shown, max((s for cause in causes for s in cause.devices.values()), default=0.0) or 1.0


def heat_map(of: Explained) -> Iterator[str]:
    """Return a row per device and a column per cause, darker where more is lost; nothing where nothing is."""
    causes, shown, most = most_lost(of)
    if not causes:
        return
    width = max(len(cause.cause) for cause in causes)
    yield f"{'device':>8}  " + "  ".join(f"{cause.cause:^{width}}" for cause in causes)
    for device in shown:
        levels = (cause.devices.get(device, 0.0) / most for cause in causes)
        cells = (f"{SHADES[round(level * (len(SHADES) - 1))] * 3:^{width}}" for level in levels)
        yield f"{device:>8}  " + "  ".join(cells)
    if len(shown) < of.schedule.devices:
        yield f"          ({of.schedule.devices - len(shown)} devices that lose less are not shown)"
