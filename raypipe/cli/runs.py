"""Verbs that read the directory of a run: explain, report, watch, sample, export; and dashboards for all runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.options import (
    File,
    JsonFile,
    RunDir,
    check_writable,
    emit,
    optional_value,
    output,
    write,
)
from raypipe.cli._shared.options import output as output_file
from raypipe.errors import RequestError, check_known, shortest


def prepare_explain(argv: Sequence[str]) -> list[str]:
    """Allow ``--json`` without a FILE, also before RUN_DIR."""
    return optional_value(argv, "--json", [word for word in argv if Path(word).is_dir()])


def explain(
    run_dir: RunDir,
    profile: Annotated[
        File,
        typer.Option(metavar="FILE", help="What layers should cost, of `raypipe profile` [the run's own, if any]."),
    ] = None,
    json_file: JsonFile = None,
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

    if plot is not None:
        from raypipe.observe.figures import check_format

        check_format(plot)
    check_writable(json_file, plot)
    run = read_run(run_dir)
    with as_runs_write(run_dir):
        result = explain_run(run, profile)
    if plot is not None:
        from raypipe.observe.figures import gantt, save

        save(gantt([result.timeline], time_label="seconds", critical=True), plot)
    if json_file is not None:
        emit(result.as_json(), json_file)
        return
    from rich.console import Console

    from raypipe.observe.explained_run import explanation_table

    Console().print(explanation_table(result), highlight=False, soft_wrap=True)


def report(
    run_dir: RunDir,
    file: Annotated[
        File,
        typer.Option("-o", "--out", parser=output("--out"), metavar="FILE", help="Write here [RUN_DIR/report.html]."),
    ] = None,
) -> None:
    """Write a run as one HTML file: predicted beside measured, losses, plans compared, memory, events."""
    from raypipe.observe.report import report_page
    from raypipe.observe.run_record import as_runs_write, comparison_lines, read_run

    target = file if file is not None else run_dir / "report.html"
    check_writable(file)
    run = read_run(run_dir)
    with as_runs_write(run_dir):
        page, lines = report_page(run), list(comparison_lines(run))
    write(target, page)
    for line in lines:
        print(line)
    print(f"report           {shortest(target)}")


def watch(
    run_dir: RunDir,
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


LONGEST = 100_000
"""Largest number of tokens, which takes minutes on a CPU."""
HOTTEST, COLDEST = 100.0, 1e-4


def sample(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train`, or of `raypipe export`.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    ids: Annotated[
        str | None, typer.Option(help="Token ids to continue, such as 1,2,3; token ids are printed.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, if the model's tokens are not bytes.")
    ] = None,
    length: Annotated[int, typer.Option(help="Number of bytes or tokens to generate; at most 100000.")] = 400,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature, at most 100; 0 always takes the likeliest token.")
    ] = 0.6,
    step: Annotated[int | None, typer.Option(help="Use the checkpoint of this step, not the newest.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
) -> None:
    """Generate text with a trained language model: the newest checkpoint of a run, or an exported model."""
    from raypipe.errors import SpecError
    from raypipe.sample import Writer

    bounds = (
        ("--length", length, 1, LONGEST, "the text is printed when it is complete"),
        ("--temperature", temperature, 0, HOTTEST, "above, all tokens are about equally likely"),
        ("--seed", seed, 0, 2**63 - 1, "torch's generators accept no other seed"),
    )
    for option, value, least, most, why in bounds:
        if not least <= value <= most:
            near = least if value < least else most
            raise SpecError(option, f"{value} is not from {least} to {most}: {why}", f"use {near}")
    if 0 < temperature < COLDEST:
        raise SpecError(
            "--temperature", f"{temperature} is too close to 0 to divide by", f"use 0, or {COLDEST} or more"
        )
    writer = Writer(run_dir, tokenizer, step)
    if ids is None:
        print(writer.text(prompt, length, temperature, seed))
        return
    try:
        given = [int(part) for part in ids.split(",")]
    except ValueError:
        raise SpecError("--ids", f'"{ids}" is not a list of whole numbers', "write 1,2,3") from None
    print(",".join(map(str, writer.ids(given, length, temperature, seed))))


def export(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run of `raypipe train` with model: {hf: ...}.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", parser=output_file("--output"), help="Directory to write; it must be new or empty."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Write the checkpoint of this step, not the newest.")] = None,
) -> None:
    """Write the model of the newest checkpoint (with train.load_best_at_end: the best) for from_pretrained.

    Of a run with model.lora, write the adapters, for peft.PeftModel.from_pretrained.
    """
    from raypipe.trained import export as write

    print(write(run_dir, output, step))


def dashboards(
    action: Annotated[str, typer.Argument(help="install: put them where Ray's Grafana and Prometheus find them.")],
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=output("--to"),
            help="Put them below this folder [metrics/ of the Ray session on this machine].",
        ),
    ] = None,
) -> None:
    """Install Grafana dashboards (run, pipeline, devices) and Prometheus alerts for raypipe's metrics."""
    from raypipe.observe.metrics import install_dashboards

    check_known(RequestError, "dashboards", action, ["install"])
    for line in install_dashboards(to):
        print(line)
