"""Tables that show a profile in the terminal."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.cost.hosts import words
from raypipe.cost.profile import LayerProfile, LinkFit, Profile


def profile_tables(profile: Profile) -> RenderableType:
    """Return a table of layers with their task times by micro-batch size, and notes on links and collectives."""
    return Group(_layers(profile), *map(Text, _notes(profile)))


def _layers(profile: Profile) -> Table:
    title = f"{profile.device}, {profile.dtype}: milliseconds of each task by micro-batch size n"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "values", "kept", "waiting", "n", "F", "±", "B", "W", "BW", "R"):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    for _, run in groupby(profile.layers, key=lambda layer: layer.model_copy(update={"name": ""})):
        layers = list(run)
        for row, (size, t) in enumerate(sorted(layers[0].times.items())):
            about = _about(layers) if row == 0 else ("",) * 4
            times = (f"{1e3 * x:.3g}" for x in (t.input_grad, t.weight_grad, t.joint, t.recompute))
            table.add_row(*about, str(size), f"{1e3 * t.forward:.3g}", f"{t.spread:.0%}", *times)
    return table


def _about(layers: list[LayerProfile]) -> tuple[str, str, str, str]:
    first, last = layers[0], layers[-1]
    waiting = first.kept_bytes if first.waiting_bytes is None else first.waiting_bytes
    name = first.name if len(layers) == 1 else f"{first.name} - {last.name}"
    return name, f"{first.parameters:,}", size_text(first.kept_bytes), size_text(waiting)


def _hosts(profile: Profile) -> str:
    if profile.placed.uniform:
        return f"{profile.devices} devices, {profile.devices_per_host} per host"
    return words(profile.placed.of_first(profile.devices))


def _notes(profile: Profile) -> list[str]:
    lines = [
        "kept: memory of a sample from forward to backward; waiting: from B to W with a split backward;",
        "±: half the interquartile range of F, over its median",
        f"{_hosts(profile)}; {size_text(profile.memory_bytes)} each, of "
        f"which an empty process takes {size_text(profile.base_bytes)}",
        f"optimizer {profile.update_s_per_parameter * 1e9:.2f} ns per parameter; "
        f"{profile.task_overhead_s * 1e6:.0f} us between two tasks",
    ]
    if profile.alone < 1:
        lines.append(f"the only busy device of a host takes {profile.alone:.2f} of these times")
    if profile.source == "measured":
        lines.append(f"disturbed: {profile.noise.sentence()}")
    if profile.devices > 1:
        lines.append(f"messages inside a host: {_link(profile.inside)}")
    if len(profile.placed.of_first(profile.devices)) > 1:
        lines.append(f"messages between hosts: {_link(profile.between)}")
    for c in profile.collectives:
        cost = f"alpha {c.alpha_s * 1e6:.0f} us, {_rate(c.beta_s_per_byte)}"
        lines.append(f"{c.kind} over {c.group}: {c.model}, {cost}, off by at most {c.error:.0%}")
    return lines


def _link(fit: LinkFit) -> str:
    return f"{fit.alpha_s * 1e6:.0f} us + {_rate(fit.beta_s_per_byte)}, off by at most {fit.error:.0%}"


def _rate(seconds_per_byte: float) -> str:
    return f"bytes / {1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "no time per byte"


def size_text(size: float) -> str:
    """Format a number of bytes.

    >>> size_text(1536), size_text(3 << 30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
