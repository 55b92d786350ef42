"""Merak's evaluation (Lai et al. 2022, table III and figure 9a) from costs, on the machine of its section 6.1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.gpt_work import PYTORCH_2020, gpt_work
from raypipe.cost.memory import device_memory
from raypipe.cost.profile import Profile
from raypipe.cost.stages import costs_of
from raypipe.job import GptSpec, load_cluster
from raypipe.job.requested_schedule import alphas, recomputed_after
from tests.bench.papers.steps import Config, error, even_cut, pipeline, step_seconds, table

MACHINE = "cluster/devices/rtx3090.yaml"
MIB = 2**20
DEVICES, BATCH = 8, 128
"""Of table III."""
STEPS = 16
"""The share of a first stage that keeps its activations is raised by one in so many."""
TABLE_3 = {  # (stages, micro-batch): MB and samples/s when all is recomputed, then when stages keep what fits
    (4, 1): (16720, 6.81, 21150, 7.61),
    (4, 2): (21262, 6.84, 21922, 7.01),
    (8, 1): (9066, 6.39, 21872, 7.72),
    (8, 2): (13130, 6.64, 19744, 6.83),
    (8, 4): (21438, 6.21, 21818, 6.39),
}
FIGURE_9A = (0.186, 0.22)
"""Least and most time that the shifted critical path saves; the figure's single values are not in the text."""


@lru_cache
def profile(layers: int, hidden: int, heads: int) -> Profile:
    """A GPT of Merak's: sequences of 1,024 tokens, shapes of Megatron-LM (Shoeybi et al. 2019), to which it refers.

    Float32, as PyTorch 1.10 runs it on these devices, with TF32: the paper names no arithmetic, and with float16 all
    times would be about half of its own.
    """
    shape = GptSpec(layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=50257, dropout=0.1)
    tied = shape.vocabulary * hidden
    return analytic_profile(
        gpt_work(shape, "float32", PYTORCH_2020), load_cluster(MACHINE), "float32", tied=tied
    )  # fmt: skip


def saved(depth: int, microbatch: int = 1) -> float:
    """Share of a step that the shifted critical path saves against 1F1B with recomputation.

    Two layers of 3,072 a device, twice as many micro-batches as stages; their size is not given.
    """
    both = []
    for name in ("shifted-critical-path", "1f1b"):
        plan = Config(
            schedule=name, width=1, depth=depth, microbatch=microbatch, count=2 * depth, recompute=name == "1f1b"
        )
        both.append(step_seconds(profile(2 * depth, 3072, 32), plan))
    return 1 - both[0] / both[1]


def speed_and_memory(stages: int, microbatch: int, first: float) -> tuple[float, float]:
    """Samples per second of GPT-2.5B, and MiB of tensors on the fullest device; the first stage keeps a share."""
    model = profile(54, 1920, 20)
    width = DEVICES // stages
    plan = Config(
        schedule="shifted-critical-path", width=width, depth=stages, microbatch=microbatch,
        count=BATCH // (width * microbatch),
    )  # fmt: skip
    cut = even_cut(len(model.layers), stages)
    recomputed = recomputed_after(cut, alphas(stages, first))
    costs = costs_of(model, cut, microbatch, pipeline(plan), width, recomputed=recomputed)
    memory = device_memory(model, cut, pipeline(plan), microbatch, copies=width, recomputed=recomputed)
    return BATCH / step_seconds(model, plan, cut, costs), max(d.total - d.base for d in memory) / MIB


def stage_aware(stages: int, microbatch: int) -> tuple[float, float]:
    """The same with the largest share that fits."""
    model = profile(54, 1920, 20)
    room = (model.memory_bytes - model.base_bytes) / MIB
    tried = [speed_and_memory(stages, microbatch, k / STEPS) for k in range(STEPS + 1)]
    return max(result for result in tried if result[1] <= room)


def table_3() -> str:
    """Speed, memory, and what keeping activations gains."""
    rows = []
    for (stages, b), (memory, speed, _, kept) in TABLE_3.items():
        ours, need = speed_and_memory(stages, b, 0.0)
        gain, theirs = stage_aware(stages, b)[0] / ours, kept / speed
        rows.append([stages, b, f"{ours:.2f} / {speed:.2f} ({error(ours, speed)})",
                     f"{need:.0f} / {memory} ({error(need, memory)})",
                     f"{gain:.2f} / {theirs:.2f} ({error(gain, theirs)})"])  # fmt: skip
    return table(["stages", "B", "samples/s: ours / paper's", "MiB: ours / paper's", "gain: ours / paper's"], rows)


def figure_9a() -> str:
    """What the shifted critical path saves."""
    depths = (4, 8, 16, 32, 64)
    low, high = FIGURE_9A
    return table(
        ["", *(f"{d} stages" for d in depths), "paper's"],
        [[f"B = {b}", *(f"{saved(d, b):.1%}" for d in depths), f"{low:.1%} to {high:.1%}"] for b in (1, 4)],
    )


def sections() -> Iterator[tuple[str, str]]:
    """Titles and tables."""
    yield "GPT-2.5B on 8 devices, 128 samples: all recomputed, and what stage-aware recomputation gains", table_3()
    yield (
        "Time that the shifted critical path saves against 1F1B, two layers of 3,072 and two micro-batches a stage",
        (figure_9a()),
    )
