"""``raypipe explain``: why a run's steps take as long as they do, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import check_writable, output, write
from raypipe.cli._shared.options import File
from raypipe.cli._shared.values import STANDARD_OUTPUT, optional_value


def prepare(argv: Sequence[str]) -> list[str]:
    """Allow ``--json`` without a FILE, also before RUN_DIR."""
    return optional_value(argv, "--json", [word for word in argv if Path(word).is_dir()])


def explain(
    run_dir: Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-20260101-120000.")],
    profile: Annotated[
        File,
        typer.Option(metavar="FILE", help="What layers should cost, of `raypipe profile` [the run's own, if any]."),
    ] = None,
    json_file: Annotated[
        File, typer.Option("--json", parser=output("--json"), metavar="[FILE]", help="The result as one JSON object.")
    ] = None,
    plot: Annotated[
        File,
        typer.Option(
            parser=output("--plot"), metavar="FILE", help="The newest step, its critical path marked, as SVG or PNG."
        ),
    ] = None,
) -> None:
    """Say where a run's step time goes: lost seconds by cause, what mending each would gain, the best change of plan.

    Reads the run's directory only, while the run goes on or afterwards.
    """
    from raypipe.observe.explained_run import explain_run
    from raypipe.observe.run_record import as_runs_write, read_run
    from raypipe.observe.strict_json import strict_json

    if plot is not None:
        from raypipe.observe.draw.figures import check_format

        check_format(plot)
    for file in (json_file, plot):
        if file is not None and file != STANDARD_OUTPUT:
            check_writable(file)
    run = read_run(run_dir)
    with as_runs_write(run_dir):
        found = explain_run(run, profile)
    if plot is not None:
        from raypipe.observe.draw.figures import gantt, save

        save(gantt([found.timeline], time_label="seconds", critical=True), plot)
    if json_file is not None:
        text = strict_json(found.as_json())
        if json_file != STANDARD_OUTPUT:
            write(json_file, text + "\n")
        print(text)
        return
    from rich.console import Console

    from raypipe.observe.explained_run import explanation_table

    Console().print(explanation_table(found), highlight=False, soft_wrap=True)
