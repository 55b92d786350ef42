"""The gallery's entries: per schedule a shape to draw, formulas, when to use it, and its source.

Formulas are Python expressions in ``D`` (devices), ``N`` (micro-batches), ``V`` (stages per device), ``U`` (unit) and
``F B W BW R`` (times of one *device's* share of the model); a test compares each with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
