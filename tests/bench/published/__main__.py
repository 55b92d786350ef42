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
from raypipe.plan.watch import BUDGET_S
from tests.bench.published.merits import merits
from tests.bench.published.predict import ROWS, Row, chosen, layout, parts, predict, reserved_gib, rows, tokens_per_gpu

HEAD = ["", "model", "GPUs", "layout", "tokens/s/GPU", "published", "error", "GiB", "published", "error"]


MEDIAN, WORST, MEMORY = 0.10, 0.25, 0.10
"""Limits of the errors."""
WITH_EXPERTS = 0.15, 0.30
"""Those of mixtures of experts: median and worst."""


Numbered = Iterable[tuple[int, Row]]


def compared(asked_rows: Numbered) -> tuple[str, str, bool]:
    """Return the table of the rows, its summary, and whether it is within the limits."""
    lines, memory = [HEAD, ["---"] * len(HEAD)], list[float]()
    errors: dict[bool, list[float]] = {False: [], True: []}
    counts = {False: 0, True: 0}
    for number, row in asked_rows:
        counts[row.experts] += 1
        shape = f"T{row.tensor} P{row.pipeline}x{row.chunks} D{row.replicas}"
        shape += f" C{row.context}" * (row.context > 1) + f" {row.precision} {row.note}".rstrip()
        if row.refused:
            lines.append(
                [str(number), row.model, str(row.gpus), row.refused, "", f"{row.tokens_per_s_per_gpu:g}", *[""] * 4]
            )
            continue
        asked = layout(row)
        result = predict(asked)
        ours, need = tokens_per_gpu(asked, result), reserved_gib(asked, result)
        error = ours / row.tokens_per_s_per_gpu - 1
        errors[row.experts].append(abs(error))
        cells = [f"{need:.1f}", "", ""]
        if row.memory_gib is not None:
            memory.append(need / row.memory_gib - 1)
            cells[1:] = f"{row.memory_gib:g}", f"{memory[-1]:+.0%}"
        busy, idle, beside = (f"{part / result.step_s:.0%}" for part in parts(result))
        shape += f" (busy {busy}, idle {idle}, beside {beside})"
        lines.append([
            str(number), row.model, str(row.gpus), shape, f"{ours:.0f}", f"{row.tokens_per_s_per_gpu:g}",
            f"{error:+.0%}", *cells,
        ])  # fmt: skip
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    said, within = list[str](), max(map(abs, memory), default=0) <= MEMORY
    for experts, limits in ((False, (MEDIAN, WORST)), (True, WITH_EXPERTS)):
        sizes, what = errors[experts], "rows with experts" if experts else "dense rows"
        if sizes:
            of_all = f"{len(sizes)} of {counts[experts]}, median error {median(sizes):.1%}, worst {max(sizes):.1%}"
            said.append(f"{what}, tokens/s/GPU: {of_all}")
            within = within and median(sizes) <= limits[0] and max(sizes) <= limits[1]
        elif counts[experts]:
            said.append(f"{what}: none of {counts[experts]} predicted")
            within = False
    said += [f"memory: {len(memory)} rows, worst {max(map(abs, memory)):.1%}"] if memory else []
    return text, "; ".join(said), within


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
        options += [f"experts over {c.experts}"] if c.experts > 1 else []
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
        "--choose", type=float, default=BUDGET_S, metavar="SECONDS", help="time of each choice of a layout; 0 for none"
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
