"""A placement drawn in the terminal: a lane a node, then what each node does."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.graph.placement.placement import Placement
from raypipe.graph.placement.problem import HardwareGraph, PlacementGraph

LANE = 40
"""Characters of the makespan."""
MOST_ROWS = 24
"""Operations listed; a larger graph shows its lanes only."""


def placement_view(graph: PlacementGraph, hardware: HardwareGraph, found: Placement) -> RenderableType:
    """The makespan with its bound, the busy times of every node, and the operations of a small graph."""
    state = "optimal" if found.optimal else f"at most {found.gap:.1%} above the best"
    head = Text(f"makespan {found.makespan_s:.6g} s, {state}; {len(found.routes)} of {len(graph.edges)} tensors travel")
    lanes = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("node", "runs", "busy", "memory", "time"):
        lanes.add_column(heading, justify="left" if heading in ("node", "time") else "right", no_wrap=True)
    for node in hardware.nodes:
        names = [name for name in graph.order if found.node[name] == node.name]
        spans = [(found.start_s[name], graph.by_name[name].seconds_on(node.name)) for name in names]
        busy = sum(length for _, length in spans) / found.makespan_s if found.makespan_s else 0.0
        memory = sum(graph.by_name[name].memory_bytes for name in names)
        lanes.add_row(
            node.name, str(len(names)), f"{busy:.0%}", f"{memory / 2**30:.2f} GiB", _lane(spans, found.makespan_s)
        )
    parts: list[RenderableType] = [head, lanes]
    if len(graph.operations) <= MOST_ROWS:
        parts.append(_operations(graph, found))
    return Group(*parts)


def _lane(spans: list[tuple[float, float]], makespan_s: float) -> str:
    cells = [" "] * LANE
    for begin, length in spans:
        if makespan_s:
            first = int(begin / makespan_s * LANE)
            for cell in range(first, max(first + 1, round((begin + length) / makespan_s * LANE))):
                cells[min(cell, LANE - 1)] = "█"
    return "".join(cells)


def _operations(graph: PlacementGraph, found: Placement) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("operation", "node", "start", "end"):
        table.add_column(heading, justify="left" if heading in ("operation", "node") else "right")
    for name in sorted(found.node, key=lambda each: found.start_s[each]):
        start, node = found.start_s[name], found.node[name]
        table.add_row(name, node, f"{start:.6g}", f"{start + graph.by_name[name].seconds_on(node):.6g}")
    return table
