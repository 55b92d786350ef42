"""Show a partition in the terminal, from its report."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.observe.profile_table import size_text

COLOURS = ("bright_blue", "bright_green", "yellow", "magenta", "cyan", "bright_red")
BAR = 12
"""Width of the slowest stage's bar, in characters."""
WRAPPED = ("contents", "sent to the next")
COLUMNS = ("stage", "device", "sub-graphs", WRAPPED[0], "parameters", "forward", "backward", "", WRAPPED[1])


def partition_view(found: dict[str, Any], name: str) -> RenderableType:
    """Return the sub-graphs as one strip, a table of stages with the tensors they send, and both assignments' figures.

    The two assignments of sub-graphs to stages are the even one and the balanced one.
    """
    return Group(_head(found, name), _strip(found), Text(), _stages(found), *_balance(found), _weights(found))


def _head(found: dict[str, Any], name: str) -> Text:
    most = found["most_tensors_across_any_cut"]
    tensors = f"{most} tensor{'s' * (most != 1)}"
    count = len(found["subgraphs"])
    return Text(f"{name}: {found['parameters']:,} parameters in {count} sub-graphs; at most {tensors} across any cut")


def _strip(found: dict[str, Any]) -> Text:
    """One letter per sub-graph, and a bar at each cut of the balanced assignment."""
    text = Text()
    for number, stage in enumerate(found["stages"]):
        first, end = stage["subgraphs"]
        if number:
            text.append("|", "bold")
        letters = "".join(
            s["label"][:1].upper() if not s["block"] else s["label"][:1] for s in found["subgraphs"][first:end]
        )
        text.append(letters, COLOURS[number % len(COLOURS)])
    return text


def _stages(found: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        right = column in ("parameters", "forward", "backward")
        table.add_column(column, justify="right" if right else "left", no_wrap=column not in WRAPPED)
    slowest = max(stage["seconds"] for stage in found["stages"])
    cuts = [*found["cuts"], None]
    for number, (stage, cut) in enumerate(zip(found["stages"], cuts, strict=True)):
        first, end = stage["subgraphs"]
        colour = COLOURS[number % len(COLOURS)]
        table.add_row(
            Text(str(number), colour),
            ", ".join(map(str, stage["devices"])),
            f"{first}-{end - 1}",
            _contents(found["subgraphs"][first:end]),
            f"{stage['parameters']:,}",
            _time(stage["forward_s"]),
            _time(stage["backward_s"]),
            Text("█" * max(1, round(BAR * stage["seconds"] / slowest)), colour),
            "" if cut is None else "\n".join(map(_tensor, cut["tensors"])),
        )
    return table


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {'x'.join(map(str, tensor['shape']))} {tensor['dtype']}, {size_text(tensor['bytes'])}"


def _contents(subgraphs: list[dict[str, Any]]) -> str:
    """``embedding, 13 attention, 12 mlp``."""
    counted: dict[str, int] = {}
    for subgraph in subgraphs:
        counted[subgraph["label"]] = counted.get(subgraph["label"], 0) + 1
    return ", ".join(label if n == 1 else f"{n} {label}" for label, n in counted.items())


def _balance(found: dict[str, Any]) -> list[Text]:
    lines = []
    for name in ("even", "balanced"):
        assigned = found["balance"][name]
        sizes = "/".join(str(n) for n in assigned["subgraphs"])
        slowest, step = _time(max(assigned["device_seconds"])), _time(assigned["step_s"])
        lines.append(Text(f"{name:>8}: {sizes} sub-graphs, slowest device {slowest}, step {step}"))
    proof = f"no assignment can be below {_time(found['balance']['bound_s'])}"
    if found["balance"]["proven"]:
        proof = "proven optimal: no assignment has a faster slowest device"
    lines.append(Text(f"balanced is {found['balance']['speedup']:.3f} times as fast as even; {proof}"))
    where = f"times of a micro-batch of {found['microbatch']} on {found['device']} ({found['seconds_from']})"
    lines.append(Text(f"{where}; a step is {found['schedule']} of {found['microbatches']}", "dim"))
    return lines


def _weights(found: dict[str, Any]) -> Text:
    share = found["weight_gradients_in_b"]
    words = f"of the weight gradients' FLOPs, {share:.1%} cannot wait for W where a schedule splits the backward"
    return Text(words, "dim" if share <= 0.02 else "yellow")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
