"""``raypipe hybrid EPOCHS.yaml``: when splitting the model beats adding data-parallel copies."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import check_writable, described_cluster, output
from raypipe.cli._shared.options import File, Text
from raypipe.cli._shared.values import comma_list
from raypipe.errors import RequestError
from raypipe.files import short
from raypipe.job.field_types import MOST_DEVICES
from raypipe.observe.strict_json import strict_json


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
    from raypipe.plan.hybrid import compare, load_epochs, workers_needed

    counts = None if devices is None else comma_list("--devices", devices, int)
    if counts is not None and min(counts) < 1:
        raise RequestError("--devices", f"{min(counts)} devices train nothing", "give numbers from 1 up")
    if counts is not None and max(counts) > MOST_DEVICES:
        raise RequestError("--devices", f"{short(str(max(counts)))} devices", f"use at most {MOST_DEVICES}")
    if plot is not None:
        from raypipe.observe.draw.figures import check_format

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
    found = compare(table, counts)
    if plot is not None:
        from raypipe.observe.draw.figures import hybrid_plot, save

        save(hybrid_plot(found, epochs.stem), plot)
    if json:
        from raypipe.observe.tables import hybrid_document

        print(strict_json(hybrid_document(found)))
        return
    from rich.console import Console

    from raypipe.observe.tables import hybrid_table

    Console(highlight=False).print(hybrid_table(found))
