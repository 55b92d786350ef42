"""``raypipe report``: a run as one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import check_writable, output, write
from raypipe.cli._shared.options import File
from raypipe.errors import shortest


def report(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-20260101-120000.")],
    file: Annotated[
        File,
        typer.Option("-o", "--out", parser=output("--out"), metavar="FILE", help="Write here [RUN_DIR/report.html]."),
    ] = None,
) -> None:
    """Write a run as one HTML file: predicted beside measured, losses, plans compared, memory, events."""
    from raypipe.observe.report import report_page
    from raypipe.observe.run_record import as_runs_write, comparison_lines, read_run

    target = file if file is not None else run_dir / "report.html"
    if file is not None:
        check_writable(file)
    run = read_run(run_dir)
    with as_runs_write(run_dir):
        page, lines = report_page(run), list(comparison_lines(run))
    write(target, page)
    for line in lines:
        print(line)
    print(f"report           {shortest(target)}")
