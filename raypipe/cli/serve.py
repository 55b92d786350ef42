"""``raypipe serve`` answers the Tinker API: other programs train a job's model by calls."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from raypipe.cli._shared.options import JobFile, Overrides


def serve(
    job: JobFile,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8300,
    models: Annotated[
        Optional[int],  # noqa: UP045 - Typer reads annotations at run time, on Python 3.10 too
        typer.Option(min=1, help="Models that clients may have at once [16 with model.lora, else 1]."),
    ] = None,
    override: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for the plan and checkpoints [runs/NAME-TIME].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Bring back the models of the server that ran in the run directory.")
    ] = False,
) -> None:
    """Serve a job's model to programs that train it by calls, as those written for the Tinker API do."""
    from raypipe.job import load_job
    from raypipe.observe.progress import Notes, stderr_console
    from raypipe.service.serve import serve as serve_job

    spec = load_job(job, override or ())
    with contextlib.redirect_stdout(sys.stderr):
        serve_job(spec, run_dir, host, port, models, Notes(stderr_console()), resume)
