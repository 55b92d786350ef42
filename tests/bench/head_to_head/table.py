"""Blocks to figures: medians, paired ratios, shares of the ideal; printed as tables and written as JSON."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.head_to_head.cases import DEVICES, PEERS
from tests.bench.head_to_head.rivals import Block, largest_difference
from tests.bench.head_to_head.rounds import IDEAL, CaseResult

TOLERANCE = 1e-4
"""Largest relative difference of losses. All contenders compute the same sums in float32 but group them differently
(micro-batches, kernels): 1e-7 a step at first. AdamW divides by the gradient's own size, so the few weights whose
gradient is all rounding may move by the full learning rate either way; that feeds back some 1e-6 over a block. A wrong
weight, sample or update shows as 1e-3 and more."""
FIRST_STEP, DRIVER = 1.5, 0.01
"""What the project wants: at most these ratios of the first step and of dispatch to a steady step."""


def summarise(result: CaseResult) -> dict[str, Any]:
    """All figures of a case, as plain data. Times in seconds."""
    case = result.case

    def steady(name: str) -> list[float]:
        return [block.steady(case.warm_up) for block in result.blocks[name]]

    single = steady(IDEAL)
    ideal = median(single) / DEVICES
    schedules: dict[str, Any] = {}
    for name in case.schedules:
        if f"raypipe {name}" not in result.blocks:
            continue
        ours, theirs = steady(f"raypipe {name}"), steady(f"torch {name}")
        paired = [a / b for a, b in zip(ours, theirs, strict=True)]
        schedules[name] = {
            "raypipe_s": median(ours),
            "torch_s": median(theirs),
            "ratio": median(paired),
            "ratio_range": [min(paired), max(paired)],
            "raypipe_share_of_ideal": median(s / DEVICES / a for a, s in zip(ours, single, strict=True)),
            "torch_share_of_ideal": median(s / DEVICES / b for b, s in zip(theirs, single, strict=True)),
            "same_order": result.same_order[name],
            "loss_difference": _difference(result, f"raypipe {name}", f"torch {name}"),
            "standstill_share": median(c.standstill for c in result.driver[name]),
            "driver_cpu_share": median(c.cpu for c in result.driver[name]),
        }
        schedules[name]["peers"] = {
            peer: {
                "step_s": median(steady(f"{peer} {name}")),
                "ratio": median(a / b for a, b in zip(ours, steady(f"{peer} {name}"), strict=True)),
                "loss_difference": _difference(result, f"raypipe {name}", f"{peer} {name}"),
            }
            for peer in ("torch", *PEERS)
            if f"{peer} {name}" in result.blocks
        }
        for side, row in {"raypipe": schedules[name], **schedules[name]["peers"]}.items():
            blocks = result.blocks[f"{side} {name}"]
            row["cpu_s"] = median(block.work(case.warm_up) for block in blocks)
            row["peak_bytes"] = max(block.peak_bytes for block in blocks)
        if f"compiled {name}" in result.blocks:
            compiled = steady(f"compiled {name}")
            schedules[name] |= {
                "compiled_s": median(compiled),
                "compiled_over_eager": median(a / b for a, b in zip(compiled, ours, strict=True)),
                "compiled_over_torch": median(a / b for a, b in zip(compiled, theirs, strict=True)),
                "compiled_loss_difference": _difference(result, f"compiled {name}", f"torch {name}"),
            }
    contenders = [name for name in result.blocks if name.startswith(("raypipe ", "compiled "))]
    best = min(contenders, key=lambda name: median(steady(name)))
    torchs_best = min(schedules, key=lambda name: schedules[name]["torch_s"])
    ours = steady(best)
    plain = {
        name: {
            "step_s": median(steady(name)),
            "ratio": median(a / b for a, b in zip(ours, steady(name), strict=True)),
            "loss_difference": _difference(result, best, name),
        }
        for name in result.blocks
        if name == f"torch {torchs_best}" or not name.startswith(("raypipe ", "compiled ", "torch ", *PEERS))
    }
    differences = [row["loss_difference"] for row in (*schedules.values(), *plain.values())]
    differences += [peer["loss_difference"] for row in schedules.values() for peer in row["peers"].values()]
    differences += [row.get("compiled_loss_difference", 0.0) for row in schedules.values()]
    return {
        "case": case.name,
        "about": case.about,
        "rounds": len(single),
        "steps_per_block": case.steps - case.warm_up,
        "target_ratio": case.target,
        "ideal_s": ideal,
        "schedules": schedules,
        "best_schedule": best,
        "rivals": plain,
        "skipped": result.skipped,
        "first_step_ratio": median(result.first_steps),
        "busy_when_idle": median(result.busy_when_idle),
        "losses_agree": max(differences) <= TOLERANCE,
    }


def _difference(result: CaseResult, ours: str, theirs: str) -> float:
    def curves(blocks: list[Block]) -> list[float]:
        return [loss for block in blocks for loss in block.losses]

    return largest_difference(curves(result.blocks[ours]), curves(result.blocks[theirs]))


def show(figures: dict[str, Any], out: Console) -> None:
    """Print one case."""
    out.print(f"\n[bold]{figures['case']}[/]: {figures['about']}; {DEVICES} devices of one thread, AdamW, float32")
    out.print(
        f"medians over {figures['rounds']} rounds of the median of {figures['steps_per_block']} steps; "
        "ratios are paired within a round;\n"
        f"CPU: processor time of a step, all devices; processors busy between rounds: {figures['busy_when_idle']:.0%}"
    )
    table = Table(
        "schedule", *("raypipe ms", "torch ms", "ratio (range)", "CPU ms", "torch", "of ideal", "torch", "loss diff")
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for extra in ("same order", "standstill", "driver CPU"):
        table.add_column(extra, justify="right")
    for name, row in figures["schedules"].items():
        low, high = row["ratio_range"]
        met = row["ratio"] <= figures["target_ratio"]
        table.add_row(
            name, f"{row['raypipe_s'] * 1e3:.1f}", f"{row['torch_s'] * 1e3:.1f}",
            f"[{'green' if met else 'red'}]{row['ratio']:.3f}[/] ({low:.2f}-{high:.2f})",
            f"{row['cpu_s'] * 1e3:.1f}", f"{row['peers']['torch']['cpu_s'] * 1e3:.1f}",
            f"{row['raypipe_share_of_ideal']:.0%}", f"{row['torch_share_of_ideal']:.0%}",
            f"{row['loss_difference']:.0e}", "yes" if row["same_order"] else "no",
            _share(row["standstill_share"]), _share(row["driver_cpu_share"]),
        )  # fmt: skip
    out.print(table)
    table = Table("on the same job", *("", "ms", "raypipe / it", "CPU ms", "peak MiB", "loss diff"))
    for column in table.columns[2:]:
        column.justify = "right"
    for name, row in figures["schedules"].items():
        if len(row["peers"]) == 1:
            continue
        table.add_row(
            name, "raypipe", f"{row['raypipe_s'] * 1e3:.1f}", "", f"{row['cpu_s'] * 1e3:.1f}",
            f"{row['peak_bytes'] / 2**20:.0f}", "",
        )  # fmt: skip
        for peer, its in row["peers"].items():
            table.add_row(
                "", peer, f"{its['step_s'] * 1e3:.1f}", _colour(its["ratio"], 1.0, f"{its['ratio']:.3f}"),
                f"{its['cpu_s'] * 1e3:.1f}", f"{its['peak_bytes'] / 2**20:.0f}", f"{its['loss_difference']:.0e}",
            )  # fmt: skip
    if table.rows:
        out.print(table)
    compiled = {name: row for name, row in figures["schedules"].items() if "compiled_s" in row}
    if compiled:
        table = Table("compiled stages", *("ms", "/ eager", "/ torch", "loss diff"))
        for column in table.columns[1:]:
            column.justify = "right"
        for name, row in compiled.items():
            table.add_row(
                name, f"{row['compiled_s'] * 1e3:.1f}", f"{row['compiled_over_eager']:.3f}",
                f"{row['compiled_over_torch']:.3f}", f"{row['compiled_loss_difference']:.0e}",
            )  # fmt: skip
        out.print(table)
    out.print(f"ideal (one process, one thread, divided by {DEVICES} devices): {figures['ideal_s'] * 1e3:.1f} ms")
    best = figures["best_schedule"]
    table = Table("rival on the same mini-batch", *("ms", f"{best} / rival", "loss diff"))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in figures["rivals"].items():
        table.add_row(name, f"{row['step_s'] * 1e3:.1f}", f"{row['ratio']:.3f}", f"{row['loss_difference']:.0e}")
    out.print(table)
    first = figures["first_step_ratio"]
    out.print(
        f"first step of fresh stage actors / steady step: {_colour(first, FIRST_STEP, f'{first:.2f}')}\n"
        f"losses {'agree' if figures['losses_agree'] else '[red]differ[/]'} (relative, at most {TOLERANCE:.0e})"
    )
    for name, why in figures["skipped"].items():
        out.print(f"left out: {name}: {why}", markup=False)


def _share(value: float) -> str:
    return _colour(value, DRIVER, f"{value:.2%}")


def _colour(value: float, limit: float, text: str) -> str:
    return f"[{'green' if value <= limit else 'red'}]{text}[/]"
