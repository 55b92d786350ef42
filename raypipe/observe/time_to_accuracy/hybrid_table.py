"""The comparison of data parallelism with hybrids, as a table for the terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.plan.hybrid import Comparison


def hybrid_document(found: Comparison) -> dict[str, Any]:
    """The JSON of ``raypipe hybrid``: speed-ups over one device, and times to converge in seconds if they are known."""
    rows = []
    for row in found.rows:
        entry: dict[str, Any] = {
            "devices": row.devices,
            "dp": row.dp,
            "hybrid": {str(m): su for m, su in row.hybrid.items()},
            "best": row.best,
            "gain": row.gain,
        }
        if found.single_device_s is not None:
            entry["converge_s"] = found.single_device_s / max(row.dp, *_known(row.hybrid))
        rows.append(entry)
    return {"rows": rows, "tipping_point": found.tipping_point}


def hybrid_table(found: Comparison) -> RenderableType:
    """A row for each number of devices, the best strategy in bold, then one sentence about the tipping point."""
    splits = sorted({split for row in found.rows for split in row.hybrid})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("devices", "data parallel", *(f"hybrid, M={split}" for split in splits), "best", "gain"):
        table.add_column(heading, justify="left" if heading == "best" else "right", no_wrap=True)
    if found.single_device_s is not None:
        table.add_column("time to accuracy", justify="right")
    for row in found.rows:
        cells = [_cell(row.dp, row.best == "dp")]
        cells += [_cell(row.hybrid[split], row.best == f"hybrid-{split}") for split in splits]
        gain = "" if row.gain == -1 else f"{row.gain:+.1%}"
        times = []
        if found.single_device_s is not None:
            times = [f"{found.single_device_s / max(row.dp, *_known(row.hybrid)) / 3600:.3g} h"]
        table.add_row(str(row.devices), *cells, row.best, gain, *times)
    tipping = found.tipping_point
    said = (
        "data parallelism is at least as fast at every number of devices here"
        if tipping is None
        else f"tipping point: from {tipping} devices on, splitting the model beats adding data-parallel copies"
    )
    return Group(
        Text("speed-up in time to accuracy over one device; gain: best hybrid over data parallel"), table, said
    )


def _known(hybrid: dict[int, float | None]) -> list[float]:
    return [su for su in hybrid.values() if su is not None] or [0.0]


def _cell(value: float | None, best: bool) -> Text:
    return Text("-" if value is None else f"{value:.2f}", "bold green" if best else "")
