"""Options that several verbs share: which schedule, of which shape, how ``auto`` searches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Text = Optional[str]  # noqa: UP045 - Typer reads annotations at run time, on Python 3.10 too
File = Optional[Path]  # noqa: UP045

Devices = Annotated[Text, typer.Option(metavar="D", help="Devices [4].")]
Microbatches = Annotated[Text, typer.Option(metavar="N", help="Micro-batches [8].")]
Chunks = Annotated[Text, typer.Option(metavar="V", help="Stages per device [1].")]
Unit = Annotated[Text, typer.Option(metavar="U", help="Micro-batches a unit.")]
Pipelines = Annotated[Text, typer.Option(metavar="2F", help="Pipelines, both directions [2].")]
Concat = Annotated[Text, typer.Option(metavar="HOW", help="direct, doubling or halving.")]
MemoryLimit = Annotated[Text, typer.Option(metavar="M", help="Activations a device may hold at once.")]
Placement = Annotated[Text, typer.Option(metavar="WHERE", help="auto: line, ring, v or bidirectional [line].")]
Objective = Annotated[Text, typer.Option(metavar="WHAT", help="auto: makespan, span or period [makespan].")]
Budget = Annotated[Text, typer.Option(metavar="SECONDS", help="auto: time of the search [by size].")]
RecomputeStages = Annotated[
    Text, typer.Option(metavar="WHICH", help="auto: auto, none, all or stages 0,1,.. [auto if --recompute > 0].")
]
Backward = Annotated[Text, typer.Option(metavar="HOW", help="auto: split or joint [split].")]
