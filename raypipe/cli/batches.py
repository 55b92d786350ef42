"""Verbs about the time to an accuracy: epochs measures how many it takes by global batch, hybrid compares by them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.options import (
    File,
    Overrides,
    Text,
    check_writable,
    comma_list,
    described_cluster,
    output,
    say,
    write,
)
from raypipe.errors import RequestError, nearest
from raypipe.files import short, strict_json

SCALINGS = ("linear", "sqrt", "none")
MOST_EPOCHS, MOST_SEEDS = 1_000_000, 1000


def epochs(
    job: Annotated[Path, typer.Argument(help="Job file; its train.batch is one worker's batch.")],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            parser=output("--out"),
            metavar="FILE",
            help="Table for raypipe hybrid; FILE.runs.jsonl holds the runs, and is gone on with.",
        ),
    ],
    target: Annotated[
        float | None,
        typer.Option(metavar="LOSS", help="Validation loss at which a run ends [the job's train.early_stop.target]."),
    ] = None,
    workers: Annotated[str, typer.Option(metavar="N,N,..", help="Numbers of data-parallel workers.")] = "1,2,4,8,16,32",
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="Runs for each number of workers.")] = 3,
    max_epochs: Annotated[float, typer.Option(metavar="E", help="Epochs after which a run gives up.")] = 50.0,
    lr_scaling: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Learning rate by workers: linear, sqrt, none [linear for sgd, else sqrt]."),
    ] = None,
    mp_speedup: Annotated[
        list[str] | None,
        typer.Option("--mp-speedup", metavar="M=SU", help="Speed-up of a step on M devices, for FILE; repeatable."),
    ] = None,
    override: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print the table and all runs as one JSON object.")] = False,
) -> None:
    """Measure epochs to a target loss by really training on this device, with the global batch of N workers."""
    from raypipe.job import load_job
    from raypipe.job.field_types import MOST_DEVICES
    from raypipe.observe.progress import stderr_console
    from raypipe.profiling.epochs_to_target import Asked, Scaling, default_scaling, epochs_table, measure_epochs

    counts = comma_list("--workers", workers, int)
    if min(counts) < 1:
        raise RequestError("--workers", f"{min(counts)} workers train nothing", "give numbers from 1 up")
    if max(counts) > MOST_DEVICES:
        raise RequestError("--workers", f"{short(str(max(counts)))} workers", f"use at most {MOST_DEVICES}")
    if not 0 < max_epochs <= MOST_EPOCHS:
        raise RequestError("--max-epochs", f"{max_epochs} epochs", f"give a number above 0, at most {MOST_EPOCHS}")
    if seeds > MOST_SEEDS:
        raise RequestError(
            "--seeds", f"{short(str(seeds))} runs for each number of workers", f"use at most {MOST_SEEDS}"
        )
    if lr_scaling is not None and lr_scaling not in SCALINGS:
        raise RequestError("--lr-scaling", f"there is no rule {lr_scaling}", nearest(lr_scaling, SCALINGS))
    speedups = dict(_speedup(text) for text in mp_speedup or ())
    check_writable(out)
    spec = load_job(job, override or ())
    rules: dict[str, Scaling] = {"linear": "linear", "sqrt": "sqrt", "none": "none"}
    rule = default_scaling(spec) if lr_scaling is None else rules[lr_scaling]
    if target is None and spec.train.early_stop is not None:
        target = spec.train.early_stop.target
    if target is None:
        raise RequestError("--target", "is missing, and so is train.early_stop.target", "give the validation loss")
    asked = Asked(target, tuple(counts), seeds, max_epochs, rule)
    say(f"learning rate {spec.train.lr:g} for one worker, scaled by workers: {rule}")
    with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; standard output is for results
        runs = measure_epochs(spec, asked, out.with_name(f"{out.name}.runs.jsonl"), say)
    table, left_out = epochs_table(runs, speedups, spec.train.batch, target)
    if not table["epochs"]:
        why = f"no number of workers reached {target} with every seed within {max_epochs:g} epochs"
        raise RequestError("--target", why, "raise it, or --max-epochs")
    write(out, strict_json(table) + "\n")
    for count in left_out:
        stderr_console().print(f"{count} workers are left out: not every seed reached {target}", soft_wrap=True)
    if json:
        print(strict_json({**table, "left_out": left_out, "runs": [run._asdict() for run in runs]}))
        return
    print("workers  batch  epochs (of each seed)")
    for text, mean in table["epochs"].items():
        own = ", ".join(f"{run.epochs:.2f}" for run in runs if run.workers == int(text))
        print(f"{text:>7}  {int(text) * spec.train.batch:>5}  {mean:.2f} ({own})")
    missing = "" if speedups else ", once mp_speedup is in it (--mp-speedup 2=1.3)"
    print(f"written to {out}; compare with raypipe hybrid {out}{missing}")


def _speedup(text: str) -> tuple[int, float]:
    split, _, value = text.partition("=")
    try:
        result = int(split), float(value)
    except ValueError:
        result = 0, 0.0
    if result[0] < 2 or not 0 < result[1] < float("inf"):
        raise RequestError("--mp-speedup", f'"{text}" is not a speed-up on 2 devices or more', "write 2=1.3")
    return result


def hybrid(
    epochs: Annotated[Path, typer.Argument(help="Epochs table, such as jobs/epochs-inception-v3.yaml.")],
    devices: Annotated[
        Text, typer.Option(metavar="P,P,..", help="Numbers of devices to compare at [those of the table].")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --cluster: compute the scaling efficiency for this job's batch a worker."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=described_cluster, help="Cluster that --job's costs are computed for."),
    ] = None,
    plot: Annotated[
        File,
        typer.Option(parser=output("--plot"), metavar="FILE", help="Speed-up against devices: .svg, .png or .pdf."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as one JSON object.")] = False,
) -> None:
    """Compare data parallelism with hybrids of data and model parallelism by time to accuracy."""
    from raypipe.job.field_types import MOST_DEVICES
    from raypipe.plan.hybrid import compare, load_epochs, workers_needed

    counts = None if devices is None else comma_list("--devices", devices, int)
    if counts is not None and min(counts) < 1:
        raise RequestError("--devices", f"{min(counts)} devices train nothing", "give numbers from 1 up")
    if counts is not None and max(counts) > MOST_DEVICES:
        raise RequestError("--devices", f"{short(str(max(counts)))} devices", f"use at most {MOST_DEVICES}")
    if plot is not None:
        from raypipe.observe.figures import check_format

        check_format(plot)
    check_writable(plot)
    table = load_epochs(epochs)
    if (job is None) != (cluster is None):
        raise RequestError("--job" if job is None else "--cluster", "is missing", "give both --job and --cluster")
    if job is not None and cluster is not None:
        if "scaling_efficiency" in table.model_fields_set:
            raise RequestError("--job", f"{epochs} gives scaling_efficiency", "leave one of the two out")
        with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; standard output is for results
            from raypipe.job import load_cluster
            from raypipe.partition.job_costs import scaling_efficiency

            modelled = scaling_efficiency(job, load_cluster(cluster), workers_needed(table, counts))
        table = table.model_copy(update={"scaling_efficiency": modelled})
    result = compare(table, counts)
    if plot is not None:
        from raypipe.observe.figures import hybrid_plot, save

        save(hybrid_plot(result, epochs.stem), plot)
    if json:
        from raypipe.observe.tables import hybrid_document

        print(strict_json(hybrid_document(result)))
        return
    from rich.console import Console

    from raypipe.observe.tables import hybrid_table

    Console(highlight=False).print(hybrid_table(result))
