"""Show the planner's ranking: a table, drawings of the best three plans, and a comparison with Chimera's model."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.observe.tables import seconds, text_table
from raypipe.observe.terminal import show
from raypipe.plan.candidate import Candidate
from raypipe.plan.choose import Decision, Row, label
from raypipe.plan.decision_json import recompute_word, schedule_of, terms_beside
from raypipe.plan.plan import sharded
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.reasons import GIB
from raypipe.schedule.passes import add_updates, place_gradient_sync
from raypipe.schedule.shape import NEUTRAL
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Timeline

WIDTH = 160
"""Width of the table, in columns, if the terminal's width is unknown."""
DRAWN_DEVICES = 16
"""Plans with more devices are not drawn."""
DRAWN_TASKS = 6000
WORDED = ("chunks", "unit", "pipelines", "concat", "memory_limit")
"""Options that have words of their own among the details."""


def ranked_table(decision: Decision) -> Table:
    """Return a table with one row per candidate, the chosen one first."""
    headings, cells = ranked(decision)
    table = text_table(headings, left=("schedule", "details", "why"))
    for row, texts in zip(decision.rows, cells, strict=True):
        table.add_row(*texts, style="" if row.prediction.fits else "dim")
    return table


def ranked(decision: Decision) -> tuple[Sequence[str], list[list[str]]]:
    """Return the headings and the rows of that table."""
    shared = any(row.prediction.candidate.tensor > 1 for row in decision.rows)
    across = "D x W x T" if shared else "D x W"
    memory = ("GiB: planned", "reserved", "free")
    headings = ("", "schedule", across, "B", "N", "details", "step", "samples/s", "bubbles", *memory, "why")
    return headings, [_cells(number, row, shared) for number, row in enumerate(decision.rows, 1)]


def _cells(number: int, row: Row, shared: bool) -> list[str]:
    p, c = row.prediction, row.prediction.candidate
    across = f"{c.stages} x {c.replicas}" + (f" x {c.tensor}" if shared else "")
    return [
        str(number),
        label(c),
        across,
        str(c.microbatch),
        str(c.microbatches),
        details(p),
        seconds(p.step_s),
        f"{p.throughput:,.4g}",
        f"{p.bubble_ratio:.1%}",
        *(f"{size / GIB:.1f}" for size in (p.memory[p.fullest].planned, p.memory[p.fullest].reserved, -p.excess)),
        row.why,
    ]


def details(p: Prediction) -> str:
    """Return the options in which a candidate differs from the defaults, besides its shape."""
    c = p.candidate
    options = [
        f"{c.chunks} chunks" if c.chunks > 1 else "",
        f"units of {c.unit}" if c.unit is not None and c.unit < c.microbatches else "",
        f"{c.pipelines} pipelines" if p.form.replicas > 2 else "",
        c.concat if c.concat != "direct" else "",
        c.placement if c.schedule == "auto" else "",
        f"recompute {_recomputed(p)}" if c.recompute != "none" else "",
        "sub-pipelined" if c.sub_pipelined else "",
        "sequence parallel" if c.sequence_parallel else "",
        f"limit {c.memory_limit:g}" if c.memory_limit is not None else "",
        "copies inside hosts" if c.innermost == "replicas" else "",
        f"experts over {c.experts}" if c.experts > 1 else "",
        f"sequences over {c.context}" if c.context > 1 else "",
        _shards(c),
        f"{c.sync} sums" if c.sync != "lazy" else "",
        *(f"{key} {value}" for key, value in c.options.items() if key not in WORDED and value != NEUTRAL[key]),
    ]
    return ", ".join(option for option in options if option)


def _shards(c: Candidate) -> str:
    """Return what a candidate's copies divide, in the words of a job's keys; empty if nothing."""
    if c.shard == "none":
        return ""
    gather = f" gather {c.gather}" if c.shard == "zero3" else ""
    return c.shard + gather + (f" over {c.shard_group} copies" if c.shard_group < c.replicas else "")


def _recomputed(p: Prediction) -> str:
    word = recompute_word(p)
    return f"{word} ({len(p.recomputed or ())} of {sum(map(len, p.cut))})" if word == "layers" else word


def timeline_of(p: Prediction) -> Timeline:
    """Simulate a step of one data-parallel copy, collectives and updates included."""
    schedule = sharded(schedule_of(p), p.candidate)
    if schedule.versions == "flush":
        schedule = add_updates(place_gradient_sync(schedule, p.candidate.sync, copies=p.candidate.replicas))
    return simulate(schedule, p.costs)


def closed_model(p: Prediction) -> RenderableType | None:
    """Return a table that compares Chimera's Eq. 1 with the simulator; None if Eq. 1 does not apply."""
    rows = terms_beside(p)
    if not rows:
        return None
    c = p.candidate
    table = text_table(("", "Eq. 1", "simulated", "why they differ"), left=("", "why they differ"))
    for row in rows:
        table.add_row(row.what, seconds(row.closed_s), seconds(row.simulated_s), row.why)
    table.add_row("step", seconds(sum(r.closed_s for r in rows)), seconds(sum(r.simulated_s for r in rows)), "")
    shared = f" x {c.tensor}" if c.tensor > 1 else ""
    head = Text(
        f"Chimera's Eq. 1 and the simulator: {c.schedule}, {c.stages} x {c.replicas}{shared}, B = {c.microbatch}"
    )
    return Group(head, table)


def show_decision(decision: Decision, console: Console) -> None:
    """Print the ranking, the best three plans on one time axis, and Eq. 1 for the best plan to which it applies."""
    console.print(ranked_table(decision))
    console.print(f"\n{searched(decision)}\n", markup=False, highlight=False)
    for note in decision.notes:
        console.print(note + "\n", markup=False, highlight=False)
    drawn = best_small(decision, DRAWN_DEVICES, DRAWN_TASKS)
    if drawn:
        console.print(_drawn_title(drawn), markup=False, highlight=False)
        show([timeline_of(p) for p in drawn], console)
    closed = next((x for row in decision.rows if row.prediction.fits and (x := closed_model(row.prediction))), None)
    if closed is not None:
        console.print()
        console.print(closed)


def searched(decision: Decision) -> str:
    """Say how many candidates a decision has looked at, and how long it took."""
    left = f", {decision.left:,} not tried when the time was up (--budget)" if decision.left else ""
    return (
        f"{decision.searched:,} candidates, {decision.timed:,} simulated{left}, the others ruled out by bounds; "
        f"{decision.seconds:.1f} s"
    )


def best_small(decision: Decision, devices: int, tasks: int) -> list[Prediction]:
    """Return those of the best three plans that have at most so many devices and about so many tasks."""
    best = [row.prediction for row in decision.rows if row.prediction.fits][:3]
    return [p for p in best if p.candidate.stages <= devices and 3 * p.form.stages * p.candidate.microbatches <= tasks]


def _drawn_title(drawn: Sequence[Prediction]) -> str:
    which = "The best" if len(drawn) == 1 else f"The best {len(drawn)}"
    return f"{which} on one time axis in seconds, one data-parallel copy each:\n"
