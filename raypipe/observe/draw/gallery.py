"""Write the gallery: ``python -m raypipe.observe.draw.gallery docs`` makes docs/schedules.md and its pictures."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from raypipe.atomic_write import write_whole
from raypipe.observe.draw.caption import folded
from raypipe.observe.draw.figure_file import save
from raypipe.observe.draw.gallery_entries import ENTRIES, MAKESPAN, MOST, PERIOD, SPAN, VERSIONS, Entry
from raypipe.observe.draw.gantt import gantt
from raypipe.observe.draw.memory_plot import memory_plot
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.versions import weight_versions
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from raypipe.simulate.timeline import Timeline

COMPARED = ("1f1b", "interleaved-1f1b", "chimera-tight", "zb-h1", "zb-v")
"""Schedules on the page's first picture, with the same model, devices and micro-batches."""
INTRODUCTION = """\
# The schedules

`python -m raypipe.observe.draw.gallery docs` makes every picture on this page; the command below a picture makes a
single one. Colour and number show the micro-batch, lightness the kind of task, hatching the replica, and a dark foot
marks later stages of the same device. Unless a command says otherwise, F = B = W = 1 and messages take no time. In the
formulas, `D` devices run `N` micro-batches; `F`, `B`, `W`, `BW` = `B + W` and `R` are the times of one device's share
of the model, which its `V` stages divide among them. *Makespan* is the time from 0 to the end of the last task, *span*
the time from a device's first start to its last end, and *period* the time per step in steady state without a barrier
between steps. The unit of activations is one stage's for one micro-batch.
"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """An entry with its schedule and simulated timeline."""

    entry: Entry
    shape: Shape
    costs: CostTable
    timeline: Timeline

    @property
    def title(self) -> str:
        """Heading of the section."""
        return self.entry.title or self.entry.schedule

    @property
    def file(self) -> str:
        """File name of the picture."""
        return self.title.replace(",", "").replace(" ", "-") + ".svg"

    def measured(self, figure: str) -> float:
        """Return the simulated value of a figure, to compare with the formula of that name."""
        if figure == PERIOD:
            return period(self.timeline.schedule, self.costs)
        return {
            MAKESPAN: self.timeline.makespan,
            SPAN: max(self.timeline.device_spans),
            MOST: max(self.timeline.peak_activations),
            VERSIONS: float(max(weight_versions(self.timeline.schedule))),
        }[figure]


def draw(entry: Entry) -> Drawn:
    """Generate and simulate an entry's schedule."""
    shape = Shape(**{"devices": 4, "microbatches": 8, **entry.shape})  # type: ignore[arg-type]
    costs = CostTable.even(stages_of(entry.schedule, shape), **entry.costs)
    schedule = replace(generate(entry.schedule, shape, costs), name=entry.title or entry.schedule)
    return Drawn(entry, shape, costs, simulate(schedule, costs))


def entries() -> list[Entry]:
    """Return the entries of all named schedules; schedules without an entry get an empty one, aliases none."""
    described = {entry.schedule for entry in ENTRIES}
    known = [SCHEDULES[name].make for name in SCHEDULES if name in described]
    missing = [name for name, family in SCHEDULES.items() if name not in described and family.make not in known]
    return [e for e in ENTRIES if e.schedule in SCHEDULES] + [Entry(schedule=n, when="", source="") for n in missing]


def section(drawn: Drawn) -> str:
    """Return one section of the page, in Markdown."""
    entry, timeline = drawn.entry, drawn.timeline
    options = {**entry.shape, **entry.costs}
    command = " ".join(
        f"--{key.replace('_', '-')} {value:g}" if not isinstance(value, str) else f"--{key} {value}"
        for key, value in options.items()
    )
    lines = [f"## {drawn.title}", "", f"{_sentence(SCHEDULES[entry.schedule].about)} {entry.when}".strip(), ""]
    lines += [
        f"![{drawn.title}](schedules/{drawn.file})",
        "",
        f"`raypipe schedule {entry.schedule} {command}".rstrip() + "`",
        "",
    ]
    lines += ["| figure | formula | simulated |", "|---|---|---|"]
    lines += [f"| {name} | `{text}` | {drawn.measured(name):g} |" for name, text in entry.formulas.items()]
    for name in (MAKESPAN, PERIOD):
        if name not in entry.formulas:
            lines.append(f"| {name} | | {drawn.measured(name):g} |")
    lines.append(f"| bubble ratio | | {100 * timeline.bubble_ratio:.1f} % |")
    lines.append(f"| activations per device | | {folded(timeline.peak_activations)} |")
    return "\n".join([*lines, "", f"Source: {entry.source}.\n" if entry.source else ""])


def write(folder: Path) -> list[Path]:
    """Write ``schedules.md`` and ``schedules/*.svg`` under ``folder``; return the paths written."""
    pictures = folder / "schedules"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = [draw(entry) for entry in entries()]
    page = [INTRODUCTION]
    written = []
    firsts = {d.entry.schedule: d.timeline for d in reversed(drawn)}
    together = [firsts[name] for name in COMPARED if name in firsts]
    for name, figure, text in (
        ("compare", gantt(together), "Five schedules of the same model on the same devices:"),
        ("memory", memory_plot(together), "Their memory, each in units of its own stages' activations:"),
    ):
        save(figure, pictures / f"{name}.svg")
        written.append(pictures / f"{name}.svg")
        page.append(f"{text}\n\n![{name}](schedules/{name}.svg)\n")
    for each in drawn:
        save(gantt([each.timeline]), pictures / each.file)
        written.append(pictures / each.file)
        page.append(section(each))
    write_whole(folder / "schedules.md", "\n".join(page))
    return [*written, folder / "schedules.md"]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(f"wrote {path}")
