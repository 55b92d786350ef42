"""Tables in the terminal, all drawn one way: of profiles, partitions, placements, regions, hybrids, global batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raypipe.cost.hosts import words
from raypipe.files import said
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.forms.json_form import to_json
from raypipe.schedule.kinds import BW
from raypipe.schedule.live_activations import weight_versions
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period
from raypipe.simulate.timeline import Timeline, critical_path

if TYPE_CHECKING:
    from raypipe.cost.profile import LayerProfile, LinkFit, Profile
    from raypipe.graph.placement.problem import HardwareGraph, Placement, PlacementGraph
    from raypipe.plan.hybrid import ByTime, Comparison
    from raypipe.plan.regions.joint import Joint
    from raypipe.plan.regions.profile import RegionProfile


def text_table(
    headings: Iterable[str],
    left: Collection[str] = (),
    wrapped: Collection[str] | None = None,
    title: str | None = None,
) -> Table:
    """Return an empty table, with bold headings and without lines.

    Args:
        headings: of the columns.
        left: columns of words; numbers stand to the right.
        wrapped: columns whose cells may take several lines if the terminal is narrow; by default all.
        title: above the table.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in headings:
        narrow = wrapped is not None and name not in wrapped
        table.add_column(name, justify="left" if name in left else "right", no_wrap=narrow, overflow="fold")
    return table


def profile_tables(profile: Profile) -> RenderableType:
    """Return a table of layers with their task times by micro-batch size, and notes on links and collectives."""
    return Group(_layer_table(profile), *map(Text, _notes(profile)))


def _layer_table(profile: Profile) -> Table:
    title = f"{profile.device}, {profile.dtype}: milliseconds of each task by micro-batch size n"
    headings = ("layer", "values", "kept", "waiting", "n", "F", "±", "B", "W", BW, "R")
    table = text_table(headings, left=("layer",), wrapped=(), title=title)
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
    return name, f"{first.parameters:,}", said(first.kept_bytes), said(waiting)


def _hosts(profile: Profile) -> str:
    if profile.placed.uniform:
        return f"{profile.devices} devices, {profile.devices_per_host} per host"
    return words(profile.placed.of_first(profile.devices))


def _notes(profile: Profile) -> list[str]:
    lines = [
        "kept: memory of a sample from forward to backward; waiting: from B to W with a split backward;",
        "±: half the interquartile range of F, over its median",
        f"{_hosts(profile)}; {said(profile.memory_bytes)} each, of "
        f"which an empty process takes {said(profile.base_bytes)}",
        f"optimizer {profile.update_s_per_parameter * 1e9:.2f} ns per parameter; "
        f"{profile.task_overhead_s * 1e6:.0f} us between two tasks",
    ]
    if profile.alone < 1:
        lines.append(f"the only busy device of a host takes {profile.alone:.2f} of these times")
    if profile.source == "measured":
        lines.append(f"disturbed: {profile.noise.sentence()}")
    if profile.devices > 1:
        lines.append(f"messages inside a host: {_link_words(profile.inside)}")
    if len(profile.placed.of_first(profile.devices)) > 1:
        lines.append(f"messages between hosts: {_link_words(profile.between)}")
    for c in profile.collectives:
        cost = f"alpha {c.alpha_s * 1e6:.0f} us, {_rate(c.beta_s_per_byte)}"
        lines.append(f"{c.kind} over {c.group}: {c.model}, {cost}, off by at most {c.error:.0%}")
    return lines


def _link_words(fit: LinkFit) -> str:
    return f"{fit.alpha_s * 1e6:.0f} us + {_rate(fit.beta_s_per_byte)}, off by at most {fit.error:.0%}"


def _rate(seconds_per_byte: float) -> str:
    return f"bytes / {1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "no time per byte"


def seconds(value: float) -> str:
    """Format a time in seconds.

    >>> seconds(0.0123), seconds(1.5), seconds(120.0)
    ('12.3 ms', '1.5 s', '120 s')
    """
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"


COLOURS = ("bright_blue", "bright_green", "yellow", "magenta", "cyan", "bright_red")
BAR = 12
"""Width of the slowest stage's bar, in characters."""
WRAPPED = ("contents", "sent to the next")
COLUMNS = ("stage", "device", "sub-graphs", WRAPPED[0], "parameters", "forward", "backward", "", WRAPPED[1])


def partition_view(found: dict[str, Any], name: str) -> RenderableType:
    """Return the sub-graphs as one strip, a table of stages with the tensors they send, and both assignments' figures.

    The two assignments of sub-graphs to stages are the even one and the balanced one.
    """
    return Group(_head(found, name), _strip(found), Text(), _stages(found), *_balance(found), _weights(found))


def _head(found: dict[str, Any], name: str) -> Text:
    most = found["most_tensors_across_any_cut"]
    tensors = f"{most} tensor{'s' * (most != 1)}"
    count = len(found["subgraphs"])
    return Text(f"{name}: {found['parameters']:,} parameters in {count} sub-graphs; at most {tensors} across any cut")


def _strip(found: dict[str, Any]) -> Text:
    """Return one letter per sub-graph, and a bar at each cut of the balanced assignment."""
    text = Text()
    for number, stage in enumerate(found["stages"]):
        first, end = stage["subgraphs"]
        if number:
            text.append("|", "bold")
        letters = "".join(
            s["label"][:1].upper() if not s["block"] else s["label"][:1] for s in found["subgraphs"][first:end]
        )
        text.append(letters, COLOURS[number % len(COLOURS)])
    return text


def _stages(found: dict[str, Any]) -> Table:
    table = text_table(COLUMNS, left=set(COLUMNS) - {"parameters", "forward", "backward"}, wrapped=WRAPPED)
    slowest = max(stage["seconds"] for stage in found["stages"])
    cuts = [*found["cuts"], None]
    for number, (stage, cut) in enumerate(zip(found["stages"], cuts, strict=True)):
        first, end = stage["subgraphs"]
        colour = COLOURS[number % len(COLOURS)]
        table.add_row(
            Text(str(number), colour),
            ", ".join(map(str, stage["devices"])),
            f"{first}-{end - 1}",
            _contents(found["subgraphs"][first:end]),
            f"{stage['parameters']:,}",
            seconds(stage["forward_s"]),
            seconds(stage["backward_s"]),
            Text("█" * max(1, round(BAR * stage["seconds"] / slowest)), colour),
            "" if cut is None else "\n".join(map(_tensor, cut["tensors"])),
        )
    return table


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {'x'.join(map(str, tensor['shape']))} {tensor['dtype']}, {said(tensor['bytes'])}"


def _contents(subgraphs: list[dict[str, Any]]) -> str:
    """``embedding, 13 attention, 12 mlp``."""
    counted: dict[str, int] = {}
    for subgraph in subgraphs:
        counted[subgraph["label"]] = counted.get(subgraph["label"], 0) + 1
    return ", ".join(label if n == 1 else f"{n} {label}" for label, n in counted.items())


def _balance(found: dict[str, Any]) -> list[Text]:
    lines = []
    for name in ("even", "balanced"):
        assigned = found["balance"][name]
        sizes = "/".join(str(n) for n in assigned["subgraphs"])
        slowest, step = seconds(max(assigned["device_seconds"])), seconds(assigned["step_s"])
        lines.append(Text(f"{name:>8}: {sizes} sub-graphs, slowest device {slowest}, step {step}"))
    proof = f"no assignment can be below {seconds(found['balance']['bound_s'])}"
    if found["balance"]["proven"]:
        proof = "proven optimal: no assignment has a faster slowest device"
    lines.append(Text(f"balanced is {found['balance']['speedup']:.3f} times as fast as even; {proof}"))
    where = f"times of a micro-batch of {found['microbatch']} on {found['device']} ({found['seconds_from']})"
    lines.append(Text(f"{where}; a step is {found['schedule']} of {found['microbatches']}", "dim"))
    return lines


def _weights(found: dict[str, Any]) -> Text:
    share = found["weight_gradients_in_b"]
    words = f"of the weight gradients' FLOPs, {share:.1%} cannot wait for W where a schedule splits the backward"
    return Text(words, "dim" if share <= 0.02 else "yellow")


LANE = 40
"""Characters of the makespan."""
MOST_ROWS = 24
"""Operations listed; a larger graph shows its lanes only."""


def placement_view(graph: PlacementGraph, hardware: HardwareGraph, found: Placement) -> RenderableType:
    """Return the makespan with its bound, the busy times of every node, and the operations of a small graph."""
    state = "optimal" if found.optimal else f"at most {found.gap:.1%} above the best"
    head = Text(f"makespan {found.makespan_s:.6g} s, {state}; {len(found.routes)} of {len(graph.edges)} tensors travel")
    lanes = text_table(("node", "runs", "busy", "memory", "time"), left=("node", "time"), wrapped=())
    for node in hardware.nodes:
        names = [name for name in graph.order if found.node[name] == node.name]
        spans = [(found.start_s[name], graph.by_name[name].seconds_on(node.name)) for name in names]
        busy = sum(length for _, length in spans) / found.makespan_s if found.makespan_s else 0.0
        memory = sum(graph.by_name[name].memory_bytes for name in names)
        lanes.add_row(
            node.name,
            str(len(names)),
            f"{busy:.0%}",
            f"{memory / 2**30:.2f} GiB",
            _placement_lane(spans, found.makespan_s),
        )
    parts: list[RenderableType] = [head, lanes]
    if len(graph.operations) <= MOST_ROWS:
        parts.append(_placed_operations(graph, found))
    return Group(*parts)


def _placement_lane(spans: list[tuple[float, float]], makespan_s: float) -> str:
    cells = [" "] * LANE
    for begin, length in spans:
        if makespan_s:
            first = int(begin / makespan_s * LANE)
            for cell in range(first, max(first + 1, round((begin + length) / makespan_s * LANE))):
                cells[min(cell, LANE - 1)] = "█"
    return "".join(cells)


def _placed_operations(graph: PlacementGraph, found: Placement) -> Table:
    table = text_table(("operation", "node", "start", "end"), left=("operation", "node"))
    for name in sorted(found.node, key=lambda each: found.start_s[each]):
        start, node = found.start_s[name], found.node[name]
        table.add_row(name, node, f"{start:.6g}", f"{start + graph.by_name[name].seconds_on(node):.6g}")
    return table


def regions_document(profile: RegionProfile, joint: Joint) -> dict[str, Any]:
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
    table = text_table(
        ("region", "alone", "weight gradients beside it", "speed-up"), left=("region", "weight gradients beside it")
    )
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


def hybrid_document(found: Comparison) -> dict[str, Any]:
    """Return the JSON of ``raypipe hybrid``: speed-ups over one device, and seconds to converge if they are known."""
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
            entry["converge_s"] = found.single_device_s / max(row.dp, *_known_gains(row.hybrid))
        rows.append(entry)
    return {"rows": rows, "tipping_point": found.tipping_point}


def hybrid_table(found: Comparison) -> RenderableType:
    """Return a row for each number of devices, the best strategy in bold, then one sentence about the tipping point."""
    splits = sorted({split for row in found.rows for split in row.hybrid})
    headings = ("devices", "data parallel", *(f"hybrid, M={split}" for split in splits), "best", "gain")
    table = text_table(headings, left=("best",), wrapped=())
    if found.single_device_s is not None:
        table.add_column("time to accuracy", justify="right")
    for row in found.rows:
        cells = [_speed_up(row.dp, row.best == "dp")]
        cells += [_speed_up(row.hybrid[split], row.best == f"hybrid-{split}") for split in splits]
        gain = "" if row.gain == -1 else f"{row.gain:+.1%}"
        times = []
        if found.single_device_s is not None:
            times = [f"{found.single_device_s / max(row.dp, *_known_gains(row.hybrid)) / 3600:.3g} h"]
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


def _known_gains(hybrid: dict[int, float | None]) -> list[float]:
    return [su for su in hybrid.values() if su is not None] or [0.0]


def _speed_up(value: float | None, best: bool) -> Text:
    return Text("-" if value is None else f"{value:.2f}", "bold green" if best else "")


def batches_document(found: ByTime) -> dict[str, Any]:
    """Return the key ``time_to_target`` of ``raypipe autoconfigure --epochs --json``; seconds are predicted."""
    rows = []
    for one in found.ranked:
        c = one.decision.best.candidate
        rows.append(
            {
                "batch": one.batch,
                "lr": one.lr,
                "epochs": one.epochs,
                "steps": one.steps,
                "predicted_step_s": one.decision.best.step_s,
                "seconds": one.seconds,
                "schedule": c.schedule,
                "stages": c.stages,
                "replicas": c.replicas,
                "microbatch": c.microbatch,
            }
        )
    return {"target": found.target, "batches": rows, "left_out": {str(b): why for b, why in found.left_out.items()}}


def batches_table(found: ByTime) -> Table:
    """Return a row for each global batch, the fastest to the target first."""
    headings = ("batch", "lr", "epochs", "steps", "step", f"time to {found.target:g}", "best plan")
    table = text_table(headings, left=("best plan",))
    for one in found.ranked:
        c = one.decision.best.candidate
        plan = f"{c.schedule}, {c.stages} x {c.replicas}, micro-batches of {c.microbatch}"
        table.add_row(
            str(one.batch),
            "" if one.lr is None else f"{one.lr:.3g}",
            f"{one.epochs:.2f}",
            f"{one.steps:,.0f}",
            f"{one.decision.best.step_s:.4g} s",
            f"{one.seconds:,.4g} s",
            plan,
        )
    return table


def result(timeline: Timeline, costs: CostTable) -> dict[str, Any]:
    """Return the JSON object; ``schedule.forms.json_form.from_json`` reads schedule and costs back from it.

    Times are in the unit of ``costs``, activations in units of one stage and micro-batch.
    """
    schedule = timeline.schedule
    graph = link(schedule)
    path = critical_path(timeline, graph)
    return {
        **to_json(schedule, costs, timeline.spans),
        "makespan": timeline.makespan,
        "span": list(timeline.device_spans),
        "period": period(schedule, costs, graph),
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(weight_versions(schedule)),
        "lower_bound": lower_bound(schedule, costs),
        "critical_path": [str(span.task) for span in path.spans],
        "critical_forwards": path.forwards,
        "critical_backwards": path.backwards,
    }
