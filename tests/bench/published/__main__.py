"""Published tokens/s per GPU and memory beside raypipe's prediction of the same layout.

Run: ``python -m tests.bench.published [FILE]`` (``FILE``: rows in the form of rows.json; ``--merits``: the orders of
merit alone; ``--only N ...``: these rows; ``--choose SECONDS``: what raypipe would have chosen instead, and its
predicted gain). A few seconds on one core and those of the choices, and half a minute for models that have not been
captured yet. The device files' figures come from data sheets and kernel benchmarks; none is fitted to these rows.
Ends with status 1 above its limits, or where another one wins. The last line is the summary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from raypipe.errors import SpecError
from tests.bench.published.merits import merits
from tests.bench.published.predict import ROWS, Row, chosen, layout, parts, predict, reserved_gib, rows, tokens_per_gpu

HEAD = ["", "model", "GPUs", "layout", "tokens/s/GPU", "published", "error", "GiB", "published", "error"]


MEDIAN, WORST, MEMORY = 0.10, 0.25, 0.10
"""Limits of the errors."""


Numbered = Iterable[tuple[int, Row]]


def compared(asked_rows: Numbered) -> tuple[str, str, bool]:
    """Return the table of the rows, its summary, and whether it is within the limits."""
    lines, errors, memory = [HEAD, ["---"] * len(HEAD)], list[float](), list[float]()
    count = experts = 0
    for number, row in asked_rows:
        count, experts = count + 1, experts + row.experts
        shape = f"T{row.tensor} P{row.pipeline}x{row.chunks} D{row.replicas} {row.precision} {row.note}".strip()
        if row.refused:
            lines.append(
                [str(number), row.model, str(row.gpus), row.refused, "", f"{row.tokens_per_s_per_gpu:g}", *[""] * 4]
            )
            continue
        asked = layout(row)
        found = predict(asked)
        ours, need = tokens_per_gpu(asked, found), reserved_gib(asked, found)
        errors.append(ours / row.tokens_per_s_per_gpu - 1)
        cells = [f"{need:.1f}", "", ""]
        if row.memory_gib is not None:
            memory.append(need / row.memory_gib - 1)
            cells[1:] = f"{row.memory_gib:g}", f"{memory[-1]:+.0%}"
        busy, idle, beside = (f"{part / found.step_s:.0%}" for part in parts(found))
        shape += f" (busy {busy}, idle {idle}, beside {beside})"
        lines.append([
            str(number), row.model, str(row.gpus), shape, f"{ours:.0f}", f"{row.tokens_per_s_per_gpu:g}",
            f"{errors[-1]:+.0%}", *cells,
        ])  # fmt: skip
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    sizes = list(map(abs, errors))
    if not sizes:
        return text, "dense rows: none predicted", False
    summary = f"dense rows, tokens/s/GPU: {len(sizes)} of {count - experts}, median error {median(sizes):.1%}, "
    summary += f"worst {max(sizes):.1%}"
    if memory:
        summary += f"; memory: {len(memory)} rows, worst {max(map(abs, memory)):.1%}"
    summary += f"; rows with experts: none of {experts} predicted" if experts else ""
    within = median(sizes) <= MEDIAN and max(sizes) <= WORST and max(map(abs, memory), default=0) <= MEMORY
    return text, summary, within


def instead(asked_rows: Numbered, seconds: float) -> str:
    """Return a table of what raypipe chooses for each row's model, batch and devices, and what it predicts to gain."""
    lines = [["", "model", "GPUs", "T P x chunks D, as published", "chosen: T P x chunks D", "", "gain"], ["---"] * 7]
    for number, row in asked_rows:
        if row.refused:
            continue
        asked = layout(row)
        published = f"T{row.tensor} P{row.pipeline}x{row.chunks} D{row.replicas}"
        cells = [str(number), row.model, str(row.gpus), published]
        try:
            best = chosen(asked, seconds).best
        except SpecError as error:
            lines.append([*cells, error.why, "", ""])
            continue
        c = best.candidate
        options = [c.schedule, f"B {c.microbatch}"]
        options += [c.shard] if c.shard != "none" else []
        options += [f"recompute {c.recompute}"] if c.recompute != "none" else []
        layers = f"T{c.tensor} P{c.stages}x{c.form.stages // c.stages} D{c.replicas}"
        lines.append([*cells, layers, ", ".join(options), f"{predict(asked).step_s / best.step_s - 1:+.0%}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.published", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROWS, help="rows to read, in the form of rows.json")
    parser.add_argument("--merits", action="store_true", help="print the orders of merit alone")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="rows to compare")
    parser.add_argument(
        "--choose", type=float, default=4, metavar="SECONDS", help="time of each choice of another layout; 0 for none"
    )
    asked = parser.parse_args()
    right, summary = True, ""
    if not asked.merits:
        numbered = [one for one in enumerate(rows(asked.file), start=1) if not asked.only or one[0] in asked.only]
        text, summary, right = compared(numbered)
        print(text)
        if asked.choose:
            print("\nWhat raypipe would have chosen instead, and its predicted gain:\n")
            print(instead(numbered, asked.choose))
    if not asked.only and asked.file == ROWS:  # they are about rows of its own
        text = merits()
        print(f"\n{text}")
        right = right and "| NO |" not in text
    if summary:
        print(f"\n{summary}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
