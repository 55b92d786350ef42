"""``raypipe watch``: a run in the terminal, while it goes on or afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def watch(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-20260101-120000.")],
    once: Annotated[bool, typer.Option("--once", help="Print once and exit; so does output to a pipe.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two looks.")] = 1.0,
) -> None:
    """Follow a run in the terminal until it ends: losses, step times, devices, events. Reads its directory only."""
    from rich.console import Console
    from rich.live import Live

    from raypipe.observe.progress import live_table
    from raypipe.observe.run_record import as_runs_write, read_run

    console = Console()
    run = read_run(run_dir)
    if once or not console.is_terminal:
        with as_runs_write(run_dir):
            console.print(live_table(run), highlight=False, soft_wrap=True)
        return
    with as_runs_write(run_dir), Live(live_table(run), console=console, auto_refresh=False) as live:
        while run.state() not in ("finished", "failed", "interrupted"):
            time.sleep(every)
            run = read_run(run_dir)
            live.update(live_table(run), refresh=True)
