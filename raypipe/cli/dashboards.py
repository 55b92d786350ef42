"""``raypipe dashboards install``: raypipe's dashboards and alerts for the Grafana and Prometheus of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import output
from raypipe.errors import RequestError, nearest

ACTIONS = ("install",)


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
    from raypipe.observe.install_dashboards import install_dashboards

    if action not in ACTIONS:
        raise RequestError("dashboards", f'"{action}" is unknown', nearest(action, ACTIONS))
    for line in install_dashboards(to):
        print(line)
