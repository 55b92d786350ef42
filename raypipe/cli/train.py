"""``raypipe train``: run a job and print a summary."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raypipe.job import JobSpec


def _asked(job: JobSpec, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the ``parallel`` keys that the command line sets, with their values."""
    keys = [text.partition("=")[0].strip().split(".") for text in overrides]
    return {key[1]: getattr(job.parallel, key[1]) for key in keys if key[0] == "parallel" and len(key) > 1}


def _place(name: str) -> Path:
    """Check ``--run-dir`` as it was typed, because ``Path`` turns an empty name into the current folder."""
    from raypipe.observe.run_dir import place

    place(name)
    return Path(name)


def train(
    job: Annotated[Path, typer.Argument(help="Job file, such as jobs/quickstart.yaml.")],
    plan: Annotated[Path | None, typer.Option(help="Run this plan.json instead of the job's parallel keys.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the job file: key.path=value; repeatable.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(parser=_place, help="Directory for the run's files [runs/NAME-TIME].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run directory's newest checkpoint.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    dashboard_port: Annotated[
        int | None, typer.Option(help="If this command starts Ray, serve its dashboard on this loopback port.")
    ] = None,
) -> None:
    """Train a model on Ray as described by a job file."""
    from raypipe.cli._shared.go_on import advice, resume_command
    from raypipe.errors import InterruptionError, RunError, TerminationError, shortest
    from raypipe.job import GptSpec, load_job
    from raypipe.observe.progress import Notes, ProgressView, stderr_console
    from raypipe.observe.run_record import summary_lines
    from raypipe.signals import Terminated
    from raypipe.train import execute, prepare_run

    console = stderr_console()
    spec = load_job(job, override or ())
    with contextlib.redirect_stdout(sys.stderr):
        prepared = prepare_run(
            spec,
            run_dir,
            resume,
            plan,
            dashboard_port,
            Notes(console),
            _asked(spec, override or ()) if plan is not None else {},
        )
    go_on = resume_command(job, prepared.directory, override or (), plan)
    opening = (f"run directory {shortest(prepared.directory)}; if it is interrupted, continue with", f"  {go_on}")
    view = ProgressView(prepared.directory, prepared.job.train.steps, console, prepared.units.throughput, opening)
    view.skip_past()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices; keep standard output for results
            try:
                result = execute(prepared, dashboard_port, view.update)
            finally:
                view.close()
    except (KeyboardInterrupt, Terminated) as error:
        kind = TerminationError if isinstance(error, Terminated) else InterruptionError
        raise kind("", getattr(error, "message", "interrupted"), advice(prepared.directory, go_on)) from None
    except RunError as error:
        fix = "\n  ".join(filter(None, (error.fix, advice(prepared.directory, go_on))))
        raise type(error)(error.where, error.why, fix) from None
    result["core_wait"] = view.core_wait.share
    if json:
        print(json_module.dumps(result))
        return
    for line in summary_lines(result):
        print(line)
    if not isinstance(prepared.job.model, GptSpec):
        return
    from raypipe.sample import sample_text

    print("sample")
    text = sample_text(prepared.directory, prompt="def ", length=240, temperature=0.8, seed=0)
    print("\n".join("  " + line.rstrip() for line in text.rstrip().splitlines()))
    sys.stdout.flush()
