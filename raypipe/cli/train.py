"""``raypipe train`` runs a job and prints a summary; ``raypipe submit`` does the same as a job of a Ray cluster."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypipe.cli._shared.options import JobFile, Overrides
from raypipe.errors import python, shortest
from raypipe.observe.run_dir import CHECKPOINTS, stillborn
from raypipe.observe.run_log import METRICS

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
    job: JobFile,
    plan: Annotated[Path | None, typer.Option(help="Run this plan.json instead of the job's parallel keys.")] = None,
    override: Overrides = None,
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
    from raypipe.errors import InterruptionError, RunError, TerminationError, shortest
    from raypipe.files import strict_json
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
        print(strict_json(result))
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


def quickstart(
    override: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(parser=_place, help="Directory for the run's files [runs/quickstart-TIME].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a small GPT on Python's own library, in about two minutes, on all devices that Ray finds here."""
    from raypipe.files import shipped

    train(shipped("jobs") / "quickstart.yaml", None, override, run_dir, False, json, None)


def init(
    model: Annotated[Path, typer.Argument(help="A directory that save_pretrained wrote, or with its config.json.")],
    data: Annotated[str, typer.Argument(help="A file, a folder or a glob: text, JSONL, Parquet, arrays.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The job file to write.")] = Path("job.yaml"),
    column: Annotated[str, typer.Option(help="The column of records that holds a document.")] = "text",
) -> None:
    """Write a job file for a model and data: commented, and checked with both."""
    from raypipe.data import prepare_data
    from raypipe.errors import RequestError
    from raypipe.files import write_whole
    from raypipe.job.reading import parse_yaml
    from raypipe.job.spec import job_from
    from raypipe.launch.prepared import JobModel
    from raypipe.new_job import new_job

    if output.exists():
        raise RequestError(str(output), "exists", "give another name with -o, or remove it")
    text = new_job(model, data, column)
    job = job_from(parse_yaml(text, str(output)), str(output))
    task = JobModel(job).declared.task  # whatever is wrong with both
    if job.data.type == "documents":  # others are copied, however large
        with tempfile.TemporaryDirectory() as scratch:
            prepare_data(job, task, Path(scratch))
    write_whole(output, text)
    print(f"{output}: edit it, then {program()} train {shlex.quote(str(output))}")


def submit(
    job: Annotated[Path, typer.Argument(help="Job file below the current folder, such as jobs/quickstart.yaml.")],
    address: Annotated[
        str | None,
        typer.Option(help="The cluster's job server, such as http://HOST:8265 [RAY_ADDRESS, or this machine's]."),
    ] = None,
    override: Overrides = None,
    run_dir: Annotated[
        str | None,
        typer.Option(help="Where the run's files go, on a file system of the nodes; default ~/raypipe/runs/NAME-TIME."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run directory's newest checkpoint.")] = False,
    runtime_env: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What travels beside the current folder [jobs/runtime_env.yaml]."),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once the job server has taken it.")] = False,
) -> None:
    """Submit a job to a Ray cluster, with the current folder as its working directory, and follow it to its end."""
    from raypipe.job import load_job
    from raypipe.launch.submit import submission
    from raypipe.launch.submit import submit as hand_over

    spec = load_job(job, override or ())  # what is wrong with it is told here, not in the cluster
    what = submission(job, override or (), run_dir, resume, runtime_env, Path.cwd())
    taken = hand_over(what, address, spec.name)
    print(f"submitted {taken.id}, as this does: {what.command}", file=sys.stderr)
    if no_wait:
        print(taken.id)
        return

    def show(text: str) -> None:
        print(text, end="", flush=True)

    status = taken.follow(show)
    if status:
        raise typer.Exit(status)


def program() -> str:
    """Return how to call this program: ``raypipe`` if the shell finds it, otherwise this interpreter's module.

    >>> program() in ("raypipe", f"{python()} -m raypipe")
    True
    """
    return "raypipe" if shutil.which("raypipe") else f"{python()} -m raypipe"


def resume_command(job: Path, directory: Path, overrides: Sequence[str], plan: Path | None) -> str:
    """Return the command line that resumes a run with the options of the command that started it."""
    arguments = ["train", str(job), *(argument for text in overrides for argument in ("--set", text))]
    arguments += ["--plan", str(plan)] if plan is not None else []
    return f"{program()} {shlex.join([*arguments, '--run-dir', shortest(directory)])} --resume"


def advice(directory: Path, command: str) -> str:
    """Return how to continue a run that was interrupted or failed; "" if it trained no step."""
    if stillborn(directory) or not (directory / METRICS).exists():
        return ""
    newest = max((directory / CHECKPOINTS).glob("step-*/manifest.json"), default=None)
    if newest is None:
        return f"it had no checkpoint yet: start again, in another --run-dir than {shortest(directory)}"
    return f"to resume from its checkpoint of step {int(newest.parent.name.removeprefix('step-'))}: {command}"
