"""Write the gallery: ``python -m docs.gallery docs`` makes docs/schedules.md and its pictures.

An entry has, per schedule, a shape to draw, formulas, when to use it, and its source. Formulas are Python expressions
in ``D`` (devices), ``N`` (micro-batches), ``V`` (stages per device), ``U`` (unit) and ``F B W BW R`` (times of one
*device's* share of the model); a test compares each with the simulator.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from raypipe.files import write_whole
from raypipe.observe.figures import gantt, memory_plot, save
from raypipe.observe.terminal import folded
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.live_activations import weight_versions
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from raypipe.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One section of the gallery."""

    schedule: str
    """Name in ``SCHEDULES``."""
    when: str
    source: str
    title: str = ""
    """Heading; by default the schedule's name."""
    shape: dict[str, int | str] = field(default_factory=dict)
    """Differences from the default shape of 4 devices and 8 micro-batches."""
    costs: dict[str, float] = field(default_factory=dict)
    """Differences from the default costs of one stage's tasks, F = B = W = 1 and R = 0."""
    formulas: dict[str, str] = field(default_factory=dict)
    """Figure (``makespan``, ``span``, ``period``, ``most activations``, ``weight versions``) -> expression."""


MAKESPAN, SPAN, PERIOD, MOST, VERSIONS = "makespan", "span", "period", "most activations", "weight versions"
HALF = {"forward": 0.5, "input_grad": 0.5, "weight_grad": 0.5}
CHIMERA = "Li and Hoefler 2021, Chimera"
ZERO_BUBBLE = "Qi et al. 2023, Zero Bubble Pipeline Parallelism"
MERAK = "Lai et al. 2022, Merak, section 3.3"
OOO = "Oh et al. 2022, Out-of-Order BackProp, section 5"
COMBINED = "NVIDIA, Megatron Core, combined 1F1B (github.com/NVIDIA/Megatron-LM)"
DUALPIPE = "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.2.1; github.com/deepseek-ai/DualPipe"
CHUNKED = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training, section 2.2"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        schedule="gpipe",
        source="Huang et al. 2019, GPipe",
        when="The simplest; memory grows with N, so pair it with recomputation or few micro-batches.",
        formulas={MAKESPAN: "(N + D - 1) * (F + BW)", MOST: "N"},
    ),
    Entry(
        schedule="1f1b",
        source="Fan et al. 2021, DAPPLE; Narayanan et al. 2019, PipeDream-Flush",
        when="The default: GPipe's time with at most min(D, N) activations, whatever N.",
        formulas={MAKESPAN: "(N + D - 1) * (F + BW)", MOST: "min(D, N)"},
    ),
    Entry(
        schedule="1f1b",
        title="1f1b with slices",
        shape={"slices": 4, "microbatches": 3},
        source="Sun et al. 2024, Seq1F1B; Li et al. 2021, TeraPipe",
        when="Long sequences of causal models: each micro-batch in k = 4 slices along the sequence. Digits are slices.",
        formulas={MAKESPAN: "(4 * N + D - 1) * (F + BW) / 4", MOST: "min(D + 3, 4 * N) / 4"},
    ),
    Entry(
        schedule="interleaved-1f1b",
        shape={"chunks": 2},
        costs=HALF,
        source=CHUNKED,
        when="Few micro-batches and fast links: bubbles shrink by V, messages grow by V. Activations count in chunks.",
        formulas={MAKESPAN: "(N + (D - 1) / V) * (F + BW)", MOST: "V * D + D - 1"},
    ),
    Entry(
        schedule="interleaved-overlap",
        shape={"chunks": 2},
        costs=HALF,
        source=COMBINED,
        when="Experts divided over copies: one half of a pair hides the all-to-all of the other, for one more "
        "activation of a chunk.",
        formulas={MAKESPAN: "N * (F + BW) + (2 * D - 1) * F / V", MOST: "V * D + D"},
    ),
    Entry(
        schedule="bfs",
        shape={"chunks": 2},
        costs=HALF,
        source="Lamy-Poirier 2023, Breadth-First Pipeline Parallelism",
        when="With sharded data parallelism: each stage's parameters are gathered once per direction.",
        formulas={MAKESPAN: "(N + (D - 1) / V) * (F + BW)", MOST: "N * V"},
    ),
    Entry(
        schedule="chimera",
        source=f"{CHIMERA}, section 3",
        when="N close to D and memory for two copies of the weights. For N well above D choose halving or doubling.",
        formulas={MAKESPAN: "(N / D * (4 * D - 2) + D - 2) * F", MOST: "D"},
    ),
    Entry(
        schedule="chimera",
        title="chimera, backward halving",
        shape={"concat": "halving"},
        source=f"{CHIMERA}, section 3.3",
        when="N above D without recomputation; backward kernels get smaller.",
        formulas={MAKESPAN: "(3 * N + D - 2) * F"},
    ),
    Entry(
        schedule="chimera",
        title="chimera, forward doubling",
        shape={"concat": "doubling"},
        costs={"recompute": 1.0},
        source=f"{CHIMERA}, section 3.3",
        when="N above D where activations are recomputed anyway.",
        formulas={MAKESPAN: "(N / (2 * D) * (9 * D - 2) + 2 * (D - 2)) * F"},
    ),
    Entry(
        schedule="chimera",
        title="chimera, four pipelines",
        shape={"devices": 8, "pipelines": 4},
        costs={"input_grad": 0.5, "weight_grad": 0.5},
        source=f"{CHIMERA}, section 3.6",
        when="Memory for 2f copies of the weights: even fewer bubbles.",
        formulas={MAKESPAN: "(2 * N + D / 2 - 2) * F", MOST: "D"},
    ),
    Entry(
        schedule="chimera-tight",
        source="raypipe; the placement is Chimera's",
        when="N above D with Chimera's memory: fewer bubbles than a fixed sequence of units allows.",
        formulas={MAKESPAN: "(3 * N + 2 * (D - 2)) * F", MOST: "D"},
    ),
    Entry(
        schedule="gems",
        source="Jain et al. 2020, GEMS",
        when="Memory for a single activation: hardly any overlap.",
        formulas={MAKESPAN: "(D - 1) * F + N * (F + D * BW)", MOST: "1"},
    ),
    Entry(
        schedule="dualpipe",
        source=DUALPIPE,
        when="Experts divided over copies, and memory for two stages' weights: F||B hides the all-to-all.",
        formulas={MAKESPAN: "N * (F + BW) + (D / 2 - 1) * (F + BW + BW - 3 * W)", MOST: "D + 1"},
    ),
    Entry(
        schedule="dualpipev",
        costs=HALF,
        source="Qi et al. 2025, DualPipe could be better without the Dual; " + DUALPIPE,
        when="DualPipe's overlap without a second copy of the weights. Activations count in chunks.",
        formulas={MAKESPAN: "N * (F + BW) + (D - 1) * (F + BW + BW - 3 * W) / V", MOST: "2 * D + 1"},
    ),
    Entry(
        schedule="pipedream",
        source="Narayanan et al. 2019, PipeDream",
        when="Throughput matters most: no flush, but stale weights and up to D versions of them.",
        formulas={PERIOD: "N * (F + BW)", VERSIONS: "D"},
    ),
    Entry(
        schedule="pipedream-2bw",
        source="Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training",
        when="PipeDream's throughput with two weight versions and a delay of one step.",
        formulas={PERIOD: "N * (F + BW)", VERSIONS: "2"},
    ),
    Entry(
        schedule="zb-h1",
        source=ZERO_BUBBLE,
        when="1F1B's memory with a third of its bubbles; it needs a split backward.",
        formulas={MAKESPAN: "N * (F + B + W) + (D - 1) * (F + B - W)", MOST: "D"},
    ),
    Entry(
        schedule="zb-h2",
        source=ZERO_BUBBLE,
        when="No bubbles in the span for twice 1F1B's activations, if the optimizer has no global barrier.",
        formulas={SPAN: "N * (F + B + W) + (D - 1) * (F + B - 2 * W)", MOST: "2 * D - 1"},
    ),
    Entry(
        schedule="zb-v",
        costs=HALF,
        source="Qi et al. 2024, Pipeline Parallelism with Controllable Memory",
        when="Zero bubbles in 1F1B's memory, with two chunks per device; the first and last stage share a device.",
        formulas={SPAN: "N * (F + B + W)", MOST: "2 * D"},
    ),
    Entry(
        schedule="zeropp",
        shape={"microbatches": 7, "chunks": 3, "unit": 7},
        source="Tang et al. 2024, ZeroPP",
        when="With sharded data parallelism and no tensor parallelism: few gathers, near-zero bubbles for U >= 2D-1.",
        formulas={MAKESPAN: "N * (F + B + W) + (D - 1) * F / V", MOST: "min(N, U) * V"},
    ),
    Entry(
        schedule="early-recompute",
        shape={"microbatches": 5},
        costs={"recompute": 1.0},
        source=MERAK,
        when="If recomputation is needed: it runs while the device waits for the gradient.",
        formulas={MAKESPAN: "N * (F + R + BW) + (D - 1) * (F + BW)"},
    ),
    Entry(
        schedule="shifted-critical-path",
        shape={"microbatches": 5},
        costs={"recompute": 1.0},
        source=MERAK,
        when="If recomputation is needed and the last stage can hold its activations.",
        formulas={MAKESPAN: "N * (F + R + BW) + (D - 2) * (F + BW)"},
    ),
    Entry(
        schedule="model-parallel",
        shape={"devices": 2, "microbatches": 1, "chunks": 4},
        source=OOO,
        when="A baseline: one micro-batch at a time, no pipelining.",
        formulas={MAKESPAN: "N * (D * (F + B + W) - B / V)"},
    ),
    Entry(
        schedule="fast-forward",
        shape={"devices": 2, "microbatches": 1, "chunks": 4},
        source=OOO,
        when="One or few micro-batches: input gradients first, weight gradients fill the wait.",
        formulas={MAKESPAN: "D * (F + B) - B / V + W"},
    ),
    Entry(
        schedule="modulo",
        shape={"devices": 2, "microbatches": 1, "chunks": 4},
        source=OOO,
        when="As fast-forward, with layer l on device l mod D: more overlap for more messages.",
        formulas={MAKESPAN: "D * (F + B) - B / V + W / V"},
    ),
)


COMPARED = ("1f1b", "interleaved-1f1b", "chimera-tight", "zb-h1", "zb-v")
"""Schedules on the page's first picture, with the same model, devices and micro-batches."""
INTRODUCTION = """\
# The schedules

`python -m docs.gallery docs` makes every picture on this page; the command below a picture makes a
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
    about = SCHEDULES[entry.schedule].about
    about = about[:1].upper() + about[1:].rstrip(".") + "."
    lines = [f"## {drawn.title}", "", f"{about} {entry.when}".strip(), ""]
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


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(f"wrote {path}")
