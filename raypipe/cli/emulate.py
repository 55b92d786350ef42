"""``raypipe emulate NAME``: run a schedule end to end with timed waits instead of kernels."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, get_args

import typer

from raypipe.cli._shared.files import check_writable, output, write
from raypipe.cli._shared.make import ABOUT, load_one, make, with_shards
from raypipe.cli._shared.options import SEARCH, SHAPE, SHARDING, File, Text, Texts, grouped
from raypipe.cli._shared.values import STANDARD_OUTPUT, optional_value
from raypipe.errors import RequestError, nearest
from raypipe.files import short
from raypipe.job.parallel_spec import Innermost
from raypipe.observe.strict_json import strict_json
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.norm_policy import NORM_POLICIES, parse_norm_policy

MOST_DEVICES = 10_000
"""More devices than any cluster could run; refused before a schedule is generated for them."""


def prepare(argv: Sequence[str]) -> list[str]:
    """Allow ``--json`` without a FILE."""
    return optional_value(argv, "--json", list(ABOUT))


@grouped(shape=SHAPE, search=SEARCH, sharding=SHARDING)
def emulate(
    *,
    name: Annotated[Text, typer.Argument(metavar="NAME", help="A schedule; `raypipe schedule --list`.")] = None,
    load: Annotated[File, typer.Option(metavar="FILE", help="A hand-written schedule instead of a name.")] = None,
    shape: Texts,
    search: Texts,
    forward: Annotated[Text, typer.Option(metavar="MS", help="F [10]; a number or a list, one per stage.")] = "10",
    input_grad: Annotated[Text, typer.Option(metavar="MS", help="B [10]; BW is B plus W.")] = "10",
    weight_grad: Annotated[Text, typer.Option(metavar="MS", help="W [10].")] = "10",
    recompute: Annotated[Text, typer.Option(metavar="MS", help="R [0].")] = None,
    attention: Annotated[
        Text, typer.Option(metavar="MS", help="With --slices: the part of F that grows along the sequence [0].")
    ] = None,
    attention_grad: Annotated[
        Text, typer.Option(metavar="MS", help="With --slices: the part of B that grows along the sequence [0].")
    ] = None,
    comm: Annotated[
        Text, typer.Option(metavar="MS", help="Message latency [0]; a list: per link s to s+1, both ways.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to run.")] = 5,
    replicas: Annotated[int, typer.Option(min=1, help="Data-parallel copies, W.")] = 1,
    bandwidth: Annotated[
        float, typer.Option(metavar="GBPS", help="Bandwidth of a link in gigabytes per second [no limit].")
    ] = 0.0,
    latency_us: Annotated[
        float, typer.Option(metavar="US", min=0.0, help="Latency of a link in microseconds, added to --comm.")
    ] = 0.0,
    message_mb: Annotated[float, typer.Option(metavar="MB", min=0.0, help="Megabytes of an activation.")] = 0.0,
    grad_mb: Annotated[float, typer.Option(metavar="MB", min=0.0, help="Megabytes of a stage's gradients.")] = 0.0,
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
    norm: Annotated[
        Text, typer.Option(metavar="HOW", help="What updates do about a global norm: none, wait, optimistic [none].")
    ] = "none",
    clip_every: Annotated[int, typer.Option(metavar="K", min=0, help="optimistic: undo each K-th step's update.")] = 0,
    json_file: Annotated[
        File, typer.Option("--json", parser=output("--json"), metavar="[FILE]", help="The result as one JSON object.")
    ] = None,
    trace: Annotated[
        File,
        typer.Option(parser=output("--trace"), metavar="FILE", help="Trace of the last step, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Run a schedule with the real driver, actors and messages, and timed waits instead of kernels. Costs are in
    milliseconds."""
    if (name is None) == (load is None):
        raise RequestError("raypipe emulate", "needs one schedule", "give a NAME or --load FILE")
    for file in (json_file, trace):
        if file is not None and file != STANDARD_OUTPUT:
            check_writable(file)
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
    if innermost is not None and innermost not in get_args(Innermost):
        raise RequestError("--innermost", f'"{innermost}" is unknown', nearest(innermost, get_args(Innermost)))
    costs = {
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "recompute": recompute,
        "comm": comm,
        "attention": attention,
        "attention_grad": attention_grad,
    }
    made = (
        make([name], shape, costs, compare=False, search=search)[0]
        if name
        else load_one(load or Path(), costs, shape["memory_limit"])
    )
    _check_devices("--replicas", str(made.schedule.devices), replicas)
    if sharding["zero"] is not None and replicas == 1:
        raise RequestError("--zero", "one copy divides nothing", "add --replicas 2 or more")
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
        found = emulate(made.schedule, _in_seconds(made.costs), links, steps, replicas, policy, clip_every)
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
        if json_file != STANDARD_OUTPUT:
            write(json_file, strict_json(result) + "\n")
        print(strict_json(result))
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
    times = [f.name for f in fields(costs) if f.name != "comm"]
    scaled = {name: tuple(t * 1e-3 for t in getattr(costs, name)) for name in times}
    return replace(costs, comm=tuple(t * 1e-3 for t in costs.links), **scaled)
