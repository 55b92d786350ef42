"""Four orders of merit that users choose by: who wins in the published measurement, and by raypipe's prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from raypipe.plan.predict.prediction import Prediction
from tests.bench.published.predict import Layout, layout, parts, predict, rows, tokens_per_gpu


class Merit(NamedTuple):
    """Two ways to train the same model."""

    question: str
    names: tuple[str, str]
    layouts: tuple[Layout, Layout]
    published: tuple[float, float] | None
    """Tokens/s per GPU of the two; None where only who wins is known."""
    winner: int
    """Of the two, the one that won."""


SIX_BILLION = Layout(
    model="llama-6b", sequence=4096, batch=64, microbatch=1, dtype="bfloat16-true", cluster="h100", devices=8,
    compiled=False, recompute="full",
)  # fmt: skip
"""6.1 billion parameters on eight H100: the source gives neither batch nor sequence, so these are assumed."""


def questions() -> Iterator[Merit]:
    """Yield the four, in the order of the issue."""
    eager, compiled = (layout(row) for row in rows()[:2])
    yield Merit("8B on 8 H100", ("eager", "compiled"), (eager, compiled), (5762, 6667), 1)
    pipeline = layout(next(row for row in rows() if row.model == "llama3.1-405b"))
    yield Merit(
        "405B on 512 H100, tensor 8, pipeline 8",
        ("1F1B", "interleaved, two chunks"),
        (pipeline, replace(pipeline, chunks=2)),
        (100, 128),
        1,
    )
    yield Merit(
        "6.1B on 8 H100",
        ("FSDP", "1F1B of 8 stages, 8 micro-batches"),
        (
            replace(SIX_BILLION, shard="zero3", microbatch=8),
            replace(SIX_BILLION, pipeline=8, microbatch=8, shard="none"),
        ),
        (65000 / 8, 29800 / 8),
        0,
    )
    wide = replace(
        eager, devices=64, batch=128, microbatch=2, cluster="h100", recompute="full", compiled=True, compiled_head=True
    )
    deep = replace(wide, pipeline=8, chunks=2, microbatch=1, shard="zero1", innermost="replicas", balanced=True)
    for gigabytes, words, winner in ((46.0, "a 400 Gb/s card a GPU", 0), (1.5, "a 100 Gb/s card a host", 1)):
        yield Merit(
            f"8B on 64 H100, 128 sequences, {words}",
            ("FSDP over all", "a stage a host, copies inside it"),
            (replace(wide, between_gb_s=gigabytes), replace(deep, between_gb_s=gigabytes)),
            None,
            winner,
        )


def why(asked: tuple[Layout, Layout], found: tuple[Prediction, Prediction]) -> str:
    """Say what the slower of two loses more of: computing, idling, or what comes beside the tasks."""
    each = [
        [part * layout.devices / layout.batch for part in parts(one)] for layout, one in zip(asked, found, strict=True)
    ]
    slow = 0 if sum(each[0]) > sum(each[1]) else 1
    lost = [a - b for a, b in zip(each[slow], each[1 - slow], strict=True)]
    words = ("its tasks take longer", "its devices idle", "its gathers, sums and updates are not hidden")
    most = max(range(3), key=lambda i: lost[i])
    return f"{words[most]}: {lost[most] / sum(each[1 - slow]):+.0%} of the other's step"


def merits() -> str:
    """Return a table of the four, and what decides each."""
    head = ["", "", "tokens/s/GPU", "ratio", "published", "wins as published", "why the other one is slower"]
    lines = [head, ["---"] * len(head)]
    for question, names, asked, published, winner in questions():
        result = (predict(asked[0]), predict(asked[1]))
        ours = [tokens_per_gpu(layout, one) for layout, one in zip(asked, result, strict=True)]
        right = ours[winner] > ours[1 - winner]
        ratio = f"{published[1] / published[0]:.2f}" if published else ""
        both = " / ".join(f"{one:.0f}" for one in ours)
        verdict = "yes" if right else "NO"
        lines.append(
            [question, " / ".join(names), both, f"{ours[1] / ours[0]:.2f}", ratio, verdict, why(asked, result)]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
