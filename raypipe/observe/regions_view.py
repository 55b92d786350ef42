"""The decisions of joint scheduling, for people and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.plan.regions.joint import Joint
from raypipe.plan.regions.profile import RegionProfile


def document(profile: RegionProfile, joint: Joint) -> dict[str, Any]:
    """Return the decision as plain data: times in seconds, memory in bytes."""
    return {
        "usual_step_s": joint.usual.step_s,
        "step_s": joint.found.step_s,
        "gains": joint.gains,
        "usual_peak_bytes": joint.usual.peak_bytes,
        "peak_bytes": joint.found.peak_bytes,
        "eager": joint.eager,
        "regions": [
            {"name": region.name, "main_s": profile.main_s(n), "weight_gradients": list(joint.assigned[n])}
            for n, region in enumerate(profile.regions)
        ],
    }


def regions_table(profile: RegionProfile, joint: Joint) -> RenderableType:
    """Return a table of regions, with the decision below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("region", "alone", "weight gradients beside it", "speed-up"):
        table.add_column(title, justify="right" if title in ("alone", "speed-up") else "left")
    pairs = profile.pairs()
    for n, region in enumerate(profile.regions):
        own = joint.assigned[n]
        gains = " ".join(f"{profile.speed_up(n, layer, pairs[n, layer]):.2f}" for layer in own)
        table.add_row(region.name, f"{profile.main_s(n) * 1e3:.2f} ms", " ".join(map(str, own)) or "-", gains or "-")
    usual, found = joint.usual, joint.found
    said = (
        f"One stream takes {usual.step_s * 1e3:.2f} ms a micro-batch, two take {found.step_s * 1e3:.2f} ms "
        f"({usual.step_s / found.step_s:.3f} times as fast) and {found.peak_bytes / max(1.0, usual.peak_bytes):.3f} "
        "times the activations, by the profile."
    )
    if joint.eager:
        said += f" For memory, weight gradients of the first {joint.eager} regions run as soon as they can."
    if not joint.gains:
        said += " The plan uses one stream."
    return Group(table, Text(said))
