"""``raypipe schedule`` makes a schedule, simulates and shows it; ``emulate`` runs it with timed waits, not kernels."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Optional, get_args

import typer

from raypipe.cli._shared.make import Made, described, load_one, make, with_experts, with_shards
from raypipe.cli._shared.options import (
    SEARCH,
    SHAPE,
    SHARDING,
    SHARDING_COSTS,
    STANDARD_OUTPUT,
    File,
    JsonFile,
    Text,
    Texts,
    check_writable,
    cost_options,
    emit,
    grouped,
    optional_value,
    output,
    write,
)
from raypipe.errors import RequestError, check_known, nearest
from raypipe.files import short, strict_json
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.norm_policy import NORM_POLICIES, parse_norm_policy
from raypipe.schedule.shape import Innermost

AUTO_OPTIONS = {*SEARCH, "chunks", "pipelines", "memory_limit"}


def prepare_schedule(argv: Sequence[str]) -> list[str]:
    """Allow ``--json`` and ``--text`` without a FILE."""
    return optional_value(optional_value(argv, "--json", list(described())), "--text", list(described()))


@grouped(
    shape=SHAPE,
    search=SEARCH,
    costs=cost_options("T", "1"),
    sharding=SHARDING,
    sharding_costs=SHARDING_COSTS,
)
def schedule(
    *,
    names: Annotated[Optional[list[str]], typer.Argument(metavar="NAME", help="See --list.")] = None,  # noqa: UP045
    list_: Annotated[bool, typer.Option("--list", help="List all schedules with descriptions.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Show several schedules; costs are then those of a device's share of the model."
        ),
    ] = False,
    load: Annotated[
        File, typer.Option(metavar="FILE", help="Verify and simulate a schedule file, JSON or text.")
    ] = None,
    shape: Texts,
    search: Texts,
    costs: Texts,
    sharding: Texts,
    sharding_costs: Texts,
    json_file: Annotated[
        File,
        typer.Option(
            "--json", parser=output("--json"), metavar="[FILE]", help="Write JSON to FILE and standard output."
        ),
    ] = None,
    text_file: Annotated[
        File,
        typer.Option(
            "--text", parser=output("--text"), metavar="[FILE]", help="Write the text form, which --load reads."
        ),
    ] = None,
    plot: Annotated[
        File, typer.Option(parser=output("--plot"), metavar="FILE", help="Gantt chart: .svg, .png or .pdf.")
    ] = None,
    critical: Annotated[bool, typer.Option("--critical", help="Outline the critical path in the Gantt chart.")] = False,
    memory_plot: Annotated[
        File,
        typer.Option(parser=output("--memory-plot"), metavar="FILE", help="Plot live activations over time."),
    ] = None,
    trace: Annotated[
        File, typer.Option(parser=output("--trace"), metavar="FILE", help="Trace for ui.perfetto.dev.")
    ] = None,
    csv: Annotated[
        File, typer.Option(parser=output("--csv"), metavar="FILE", help="CSV for torch.distributed.pipelining.")
    ] = None,
) -> None:
    """Generate and simulate a schedule. It is drawn in the terminal or written as --json, --plot, --trace or --csv."""
    if list_:
        _list(json_file)
        return
    wanted = [name for word in names or [] for name in word.split(",")]
    if not wanted and load is None:
        raise RequestError("raypipe schedule", "no schedule is named", "add a name, --list shows them, or --load FILE")
    if len(wanted) + (load is not None) > 1 and not compare:
        why = f"{len(wanted) + (load is not None)} schedules are named"
        raise RequestError("raypipe schedule", why, "name one, or add --compare to show them together")
    if json_file == text_file == STANDARD_OUTPUT:
        raise RequestError("--text", "--json already writes to standard output", "give one of them a FILE")
    for option, file in (("--plot", plot), ("--memory-plot", memory_plot)):
        if file is not None:
            from raypipe.observe.figures import check_format

            check_format(file, option)
    check_writable(json_file, text_file, plot, memory_plot, trace, csv)
    costs = {**costs, **sharding_costs}
    made = make(wanted, shape, costs, compare, search)
    if load is not None:
        made.append(load_one(load, costs, shape["memory_limit"]))
    made = with_shards(made, sharding, shape["unit"])
    if critical and plot is None:
        raise RequestError("--critical", "there is no Gantt chart to draw on", "add --plot FILE")
    _show(made, json_file, text_file, plot, memory_plot, trace, csv, critical)


def _show(
    made: list[Made],
    json_file: Path | None,
    text_file: Path | None,
    plot: Path | None,
    memory_plot: Path | None,
    trace: Path | None,
    csv: Path | None,
    critical: bool,
) -> None:
    from raypipe.simulate.engine import simulate

    timelines = [simulate(each.schedule, each.costs) for each in made]
    if json_file is not None:
        from raypipe.observe.tables import result

        found = [{**result(t, each.costs), **_proof(each)} for t, each in zip(timelines, made, strict=True)]
        _json(found[0] if len(found) == 1 else {"schedules": found}, json_file)
    if text_file is not None:
        from raypipe.schedule.forms.text import to_text

        _write(text_file, "\n".join(to_text(each.schedule) for each in made))
    if plot is not None:
        from raypipe.observe.figures import gantt, save

        save(gantt(timelines, critical=critical), plot)
        _said(plot)
    if memory_plot is not None:
        from raypipe.observe.figures import memory_plot as drawn_memory
        from raypipe.observe.figures import save

        save(drawn_memory(timelines), memory_plot)
        _said(memory_plot)
    if trace is not None:
        from raypipe.observe.timelines import write_trace

        write_trace(_only("--trace", timelines), trace)
        _said(trace)
    if csv is not None:
        from raypipe.schedule.forms.text import to_torch_csv

        _write(csv, to_torch_csv(_only("--csv", made).schedule))
    if not any((json_file, text_file, plot, memory_plot, trace, csv)):
        from raypipe.observe.terminal import show

        show(timelines)
        for each in made:
            if each.found is not None:
                from raypipe.cli._shared.auto import sentence

                print(sentence(each.found))


def _proof(made: Made) -> dict[str, Any]:
    """The keys that a search adds to the JSON; empty if there was none."""
    if made.found is None:
        return {}
    from raypipe.cli._shared.auto import report

    return report(made.found)


def _list(json_file: Path | None) -> None:
    if json_file is not None:
        _json(described(), json_file)
        return
    width = max(map(len, described()))
    for name, about in described().items():
        known = SCHEDULES[name].options if name in SCHEDULES else AUTO_OPTIONS
        options = "".join(f"  --{option}" for option in sorted(o.replace("_", "-") for o in known))
        print(f"{name:<{width}}  {about}{options and '  [' + options.strip() + ']'}")


def _json(value: dict[str, Any], path: Path) -> None:
    text = strict_json(value)
    if path != STANDARD_OUTPUT:
        _write(path, text + "\n")
    if path == STANDARD_OUTPUT or not sys.stdout.isatty():  # scripts may read standard output even if there is a FILE
        print(text)


def _write(path: Path, text: str) -> None:
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    write(path, text)
    _said(path)


def _said(path: Path) -> None:
    print(f"wrote {path}", file=sys.stderr)


def _only(option: str, items: list[Any]) -> Any:
    if len(items) > 1:
        raise RequestError(option, f"writes one schedule, but {len(items)} are named", "name one")
    return items[0]


MOST_DEVICES = 10_000
"""More devices than any cluster could run; refused before a schedule is generated for them."""


def prepare_emulate(argv: Sequence[str]) -> list[str]:
    """Allow ``--json`` without a FILE."""
    return optional_value(argv, "--json", list(described()))


@grouped(shape=SHAPE, search=SEARCH, costs=cost_options("MS", "10"), sharding=SHARDING)
def emulate(
    *,
    name: Annotated[Text, typer.Argument(metavar="NAME", help="A schedule; `raypipe schedule --list`.")] = None,
    load: Annotated[File, typer.Option(metavar="FILE", help="A hand-written schedule instead of a name.")] = None,
    shape: Texts,
    search: Texts,
    costs: Texts,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run.")] = 5,
    replicas: Annotated[int, typer.Option(min=1, help="Data-parallel copies, W.")] = 1,
    bandwidth: Annotated[
        float, typer.Option(metavar="GBPS", help="Bandwidth of a link in gigabytes per second [no limit].")
    ] = 0.0,
    latency_us: Annotated[
        float, typer.Option(metavar="US", min=0.0, help="Latency of a link in microseconds, added to --comm.")
    ] = 0.0,
    message_mb: Annotated[float, typer.Option(metavar="MB", min=0.0, help="Megabytes of an activation.")] = 0.0,
    grad_mb: Annotated[
        float,
        typer.Option(
            metavar="MB", min=0.0, help="Megabytes of a stage's gradients; with --expert-parts, of each part."
        ),
    ] = 0.0,
    sharding: Texts,
    per_host: Annotated[
        int,
        typer.Option(
            min=0, help="Devices of a host: --bandwidth is then what a host sends to others [all links alike]."
        ),
    ] = 0,
    inside: Annotated[
        float, typer.Option(metavar="GBPS", min=0.0, help="With --per-host: bandwidth inside a host [no limit].")
    ] = 0.0,
    innermost: Annotated[
        Text, typer.Option(metavar="WHICH", help="With --per-host: stages or replicas share a host [stages].")
    ] = None,
    expert_parts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Divide stages with --dispatch or --combine into N parts with experts, whose tokens travel beside "
            "compute [0: in F and B].",
        ),
    ] = 0,
    skew: Annotated[
        float,
        typer.Option(
            metavar="X", help="With --expert-parts: in each step another copy's experts get X times the mean."
        ),
    ] = 1.0,
    norm: Annotated[
        Text, typer.Option(metavar="HOW", help="What updates do about a global norm: none, wait, optimistic [none].")
    ] = "none",
    clip_every: Annotated[int, typer.Option(metavar="K", min=0, help="optimistic: undo each K-th step's update.")] = 0,
    json_file: JsonFile = None,
    trace: Annotated[
        File,
        typer.Option(parser=output("--trace"), metavar="FILE", help="Trace of the last step, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Run a schedule with the real driver, actors and messages, and timed waits instead of kernels. Costs are in
    milliseconds."""
    if (name is None) == (load is None):
        raise RequestError("raypipe emulate", "needs one schedule", "give a NAME or --load FILE")
    check_writable(json_file, trace)
    for option, value in (("--latency-us", latency_us), ("--message-mb", message_mb), ("--grad-mb", grad_mb)):
        if value == math.inf:
            raise RequestError(option, "a step would never end", "give a finite number")
    if not bandwidth >= 0 or (bandwidth == 0 and (message_mb or grad_mb)):
        raise RequestError("--bandwidth", f"{bandwidth:g} gigabytes a second carry nothing", "give one above 0")
    _check_devices("--devices", shape["devices"] or "1", replicas)
    policy = parse_norm_policy(str(norm))
    if policy is None:
        raise RequestError("--norm", f'"{norm}" is unknown', nearest(str(norm), NORM_POLICIES))
    if clip_every and policy != "optimistic":
        raise RequestError("--clip-every", "there is nothing to undo", "add --norm optimistic")
    for option, given in (("--inside", inside > 0), ("--innermost", innermost is not None)):
        if given and not per_host:
            raise RequestError(option, "all links are alike", "say with --per-host how many devices a host has")
    if innermost is not None:
        check_known(RequestError, "--innermost", innermost, get_args(Innermost))
    usual = dict.fromkeys(("forward", "input_grad", "weight_grad"), "10")
    costs = {key: usual.get(key) if text is None else text for key, text in costs.items()}
    made = (
        make([name], shape, costs, compare=False, search=search)[0]
        if name
        else load_one(load or Path(), costs, shape["memory_limit"])
    )
    _check_devices("--replicas", str(made.schedule.devices), replicas)
    if sharding["zero"] is not None and replicas == 1:
        raise RequestError("--zero", "one copy divides nothing", "add --replicas 2 or more")
    if expert_parts:
        made = with_experts(made, expert_parts)
    elif skew != 1.0:
        raise RequestError("--skew", "no tokens travel on their own", "add --expert-parts 1, --dispatch and --combine")
    made = with_shards([made], sharding, shape["unit"])[0]
    from raypipe.runtime.emulation.emulated_run import emulate
    from raypipe.runtime.emulation.links import Links

    links = Links(
        latency_s=latency_us * 1e-6,
        bytes_per_s=bandwidth * 1e9 if bandwidth else math.inf,
        message_bytes=message_mb * 1e6,
        gradient_bytes=grad_mb * 1e6,
        per_host=per_host,
        inside_bytes_per_s=inside * 1e9 if inside else math.inf,
        innermost="replicas" if innermost == "replicas" else "stages",
    )
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices of its own; standard output is for results
        found = emulate(made.schedule, _in_seconds(made.costs), links, steps, replicas, policy, clip_every, skew=skew)
    if trace is not None:
        from raypipe.observe.timelines import write_trace

        write_trace(found.timeline, trace)
    result = {
        "predicted_s": found.predicted_s,
        "measured_s": found.measured_s,
        "bubble_ratio": found.bubble_ratio,
        "dispatch_overhead_s": found.dispatch_overhead_s,
        "predicted_steps_s": found.predicted_steps_s,
    }
    if json_file is not None:
        emit(result, json_file)
        return
    measured, predicted = (
        fmean(found.measured_s[1:] or found.measured_s),
        fmean(found.predicted_steps_s[1:] or found.predicted_steps_s),
    )
    print(f"{made.schedule.name}: predicted step {found.predicted_s * 1e3:.2f} ms in steady state")
    pair = f"predicted {predicted * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms"
    print(f"step{f's 2 to {steps}' if steps > 1 else ''}: {pair} ({measured / predicted - 1:+.1%})")
    print(f"idle {found.bubble_ratio:.1%}; dispatch and messages {found.dispatch_overhead_s * 1e3:.2f} ms per step")


def _check_devices(option: str, devices: str, replicas: int) -> None:
    """Check a number of devices as it was typed; what is no number is reported when it is read.

    Raises:
        RequestError: there are too many.
    """
    count = int(devices[:20]) * replicas if devices.isdecimal() else 0
    if count > MOST_DEVICES:
        why = f"{short(str(count))} emulated devices would need as many processes"
        raise RequestError(option, why, "use raypipe schedule, which needs none")


def _in_seconds(costs: CostTable) -> CostTable:
    """Convert a cost table from milliseconds to seconds."""
    times = {f.name: getattr(costs, f.name) for f in fields(costs) if f.name not in ("comm", "overlap")}
    scaled: dict[str, Any] = {name: tuple(t * 1e-3 for t in each) for name, each in times.items()}
    return replace(costs, comm=tuple(t * 1e-3 for t in costs.links), **scaled)
