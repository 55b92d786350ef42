"""``raypipe place GRAPH.json HARDWARE.json``: put each operation on a node so that a step is as short as can be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.values import DAY_S
from raypipe.errors import RequestError
from raypipe.observe.strict_json import strict_json


def place(
    graph: Annotated[Path, typer.Argument(help="Operation graph, as raypipe graph writes it.")],
    hardware: Annotated[
        Path, typer.Argument(help="Nodes, routers and links, such as cluster/placement/two-v100.json.")
    ],
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Longest search.")] = 60.0,
    contention: Annotated[
        bool, typer.Option("--contention", help="A link carries one tensor at a time in each direction.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the placement as one JSON object.")] = False,
) -> None:
    """Place operations on nodes, with start times and routes, for the shortest step; the best so far after --budget."""
    from raypipe.graph.placement.problem import load_problem

    if not 0 < budget <= DAY_S:
        raise RequestError("--budget", f"{budget:g} seconds", f"give more than 0 and at most {DAY_S:g}")
    operations, machine = load_problem(graph, hardware)
    from raypipe.graph.placement.place import place as solve

    found = solve(operations, machine, budget, contention)
    if json:
        print(strict_json(found.document(operations)))
        return
    from rich.console import Console

    from raypipe.observe.tables import placement_view

    Console(highlight=False).print(placement_view(operations, machine, found))
