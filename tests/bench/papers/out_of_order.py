"""Out-of-order backprop's fine-tuning (Oh et al. 2022, section 7.4.1) from costs: BERT-24 on four V100."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.gpt_work import PYTORCH_2020, gpt_work
from raypipe.cost.profile import LinkFit, Profile
from raypipe.cost.sizes import stage_times
from raypipe.cost.stages import Cut, costs_of
from raypipe.job import GptSpec, load_cluster
from raypipe.schedule import Shape, generate
from raypipe.schedule.passes import add_updates
from raypipe.simulate.engine import simulate
from tests.bench.papers.steps import error, table
from tests.bench.runtime.first_k import papers_case, simulated
from tests.cost.plain_layer import plain_layer

MACHINE = "cluster/devices/v100.yaml"
DEVICES, LAYERS, BATCH = 4, 24, 96
COUNTS = (4, 8)
"""Micro-batches are not counted for BERT; the paper's timelines of four devices (figure 13) have four."""
BANDWIDTH = {"NVLink": 50e9, "PCIe 3.0": 16e9, "10 Gb/s Ethernet": 1e9}
"""Bytes per second, by the paper."""
PUBLISHED = {"NVLink": 1.70, "PCIe 3.0": 1.58, "10 Gb/s Ethernet": 1.48}
"""Modulo allocation over GPipe in figure 12 (b); figure 12 (a) has 1.59 for NVLink."""


@lru_cache
def profile() -> Profile:
    """BERT-Large, sequences of 128 tokens, a classifier for a head, float32."""
    shape = GptSpec(layers=LAYERS, hidden=1024, heads=16, sequence=128, vocabulary=30522, dropout=0.1)
    *work, _ = gpt_work(shape, "float32", PYTORCH_2020)
    h = shape.hidden
    pooler = plain_layer("classifier", flops=2.0 * h * h, parameters=h * h, kept_bytes=8.0 * h, output_bytes=0)
    return analytic_profile([*work, pooler], load_cluster(MACHINE).resized(DEVICES), "float32")


def layer_cut(stages: int) -> Cut:
    """Encoders dealt out evenly; the embedding before the first, the classifier behind the last."""
    each = LAYERS // stages
    edges = [1, *(1 + each * s for s in range(1, stages)), 1 + LAYERS]
    edges[0], edges[-1] = 0, LAYERS + 2
    return [range(a, b) for a, b in pairwise(edges)]


def seconds(name: str, count: int, link: str = "NVLink") -> float:
    """Time of a mini-batch of ``count`` micro-batches."""
    wire = LinkFit(alpha_s=profile().inside.alpha_s, beta_s_per_byte=1 / BANDWIDTH[link])
    model = profile().model_copy(update={"inside": wire})
    chunks = 1 if name == "gpipe" else LAYERS // DEVICES
    schedule = generate(name, Shape(devices=DEVICES, microbatches=count, chunks=chunks))
    costs = costs_of(model, layer_cut(schedule.stages), BATCH // count, schedule)
    return simulate(add_updates(schedule), costs).makespan


def alone() -> float:
    """Time of a mini-batch on one device."""
    model = profile()
    times = stage_times(model.layers, BATCH)
    return times.forward + times.joint + model.update_s_per_parameter * sum(x.parameters for x in model.layers)


def speedups(count: int) -> dict[str, tuple[float, float]]:
    """What -> ours, the paper's."""
    gpipe, modulo = ({link: seconds(name, count, link) for link in BANDWIDTH} for name in ("gpipe", "modulo"))
    return {
        "gradient fast-forwarding (OOO-Pipe1) over GPipe": (gpipe["NVLink"] / seconds("fast-forward", count), 1.15),
        "and modulo allocation (OOO-Pipe2)": (gpipe["NVLink"] / modulo["NVLink"], 1.59),
        "OOO-Pipe2 over one device": (alone() / modulo["NVLink"], 3.2),
        **{f"OOO-Pipe2 over GPipe, {k}": (gpipe[k] / modulo[k], PUBLISHED[k]) for k in BANDWIDTH},
    }


def sections() -> Iterator[tuple[str, str]]:
    """Titles and tables."""
    result = [speedups(count) for count in COUNTS]
    rows = []
    for what, (_, theirs) in result[0].items():
        ours = [one[what][0] for one in result]
        rows.append([what, *(f"{x:.2f} ({error(x, theirs)})" for x in ours), f"{theirs:.2f}"])
    head = ["", *(f"ours, {count} micro-batches" for count in COUNTS), "paper's"]
    yield "BERT-24 on four V100, 96 samples", table(head, rows)
    yield "Data parallel: 380 ms of compute, 350 ms to sum the first layer (section 7.3)", first_layer()


def first_layer() -> str:
    """Reverse first-k with its tuned k against the usual orders; 54 layers, as of a ResNet-50."""
    *usual, (k, best) = simulated(papers_case()).items()
    rows = [[sync, f"{1e3 * time:.1f}", f"{time / best:.3f}"] for sync, time in usual]
    return table(["against", "step, ms", f"reverse first-k ({k}) is faster by"], rows)
