"""``raypipe schedule NAME``: generate a schedule, simulate it and show it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from raypipe.atomic_write import write_whole
from raypipe.cli._shared.files import check_writable, output
from raypipe.cli._shared.make import ABOUT, Made, load_one, make, with_shards
from raypipe.cli._shared.options import SEARCH, SHAPE, SHARDING, File, Text, Texts, grouped
from raypipe.cli._shared.values import STANDARD_OUTPUT, optional_value
from raypipe.errors import RequestError
from raypipe.observe.strict_json import strict_json
from raypipe.schedule import SCHEDULES

AUTO_OPTIONS = {*SEARCH, "chunks", "pipelines", "memory_limit"}


def prepare(argv: Sequence[str]) -> list[str]:
    """Allow ``--json`` and ``--text`` without a FILE."""
    return optional_value(optional_value(argv, "--json", list(ABOUT)), "--text", list(ABOUT))


@grouped(shape=SHAPE, search=SEARCH, sharding=SHARDING)
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
    forward: Annotated[Text, typer.Option(metavar="T", help="F [1]; a number or a list, one per stage.")] = None,
    input_grad: Annotated[Text, typer.Option(metavar="T", help="B [1]; BW is B plus W.")] = None,
    weight_grad: Annotated[Text, typer.Option(metavar="T", help="W [1].")] = None,
    recompute: Annotated[Text, typer.Option(metavar="T", help="R [0].")] = None,
    attention: Annotated[
        Text, typer.Option(metavar="T", help="With --slices: the part of F that grows along the sequence [0].")
    ] = None,
    attention_grad: Annotated[
        Text, typer.Option(metavar="T", help="With --slices: the part of B that grows along the sequence [0].")
    ] = None,
    comm: Annotated[
        Text, typer.Option(metavar="T", help="Message latency [0]; a list: per link s to s+1, both ways.")
    ] = None,
    sharding: Texts,
    gather_time: Annotated[Text, typer.Option(metavar="T", help="AG, with --zero [0].")] = None,
    reduce_scatter_time: Annotated[Text, typer.Option(metavar="T", help="RS, with --zero [0].")] = None,
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
            _check_picture(option, file)
    for file in (json_file, text_file, plot, memory_plot, trace, csv):
        if file is not None and file != STANDARD_OUTPUT:
            check_writable(file)
    costs = {
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "recompute": recompute,
        "comm": comm,
        "gather_time": gather_time,
        "reduce_scatter_time": reduce_scatter_time,
        "attention": attention,
        "attention_grad": attention_grad,
    }
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
        from raypipe.observe.result import result

        found = [{**result(t, each.costs), **_proof(each)} for t, each in zip(timelines, made, strict=True)]
        _json(found[0] if len(found) == 1 else {"schedules": found}, json_file)
    if text_file is not None:
        from raypipe.schedule.forms.text import to_text

        _write(text_file, "\n".join(to_text(each.schedule) for each in made))
    if plot is not None:
        from raypipe.observe.draw.figures import gantt, save

        save(gantt(timelines, critical=critical), plot)
        _said(plot)
    if memory_plot is not None:
        from raypipe.observe.draw.figures import memory_plot as drawn_memory
        from raypipe.observe.draw.figures import save

        save(drawn_memory(timelines), memory_plot)
        _said(memory_plot)
    if trace is not None:
        from raypipe.observe.timelines import write_trace

        write_trace(_only("--trace", timelines), trace)
        _said(trace)
    if csv is not None:
        from raypipe.schedule.forms.torch_csv import to_torch_csv

        _write(csv, to_torch_csv(_only("--csv", made).schedule))
    if not any((json_file, text_file, plot, memory_plot, trace, csv)):
        from raypipe.observe.draw.terminal import show

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
        _json(ABOUT, json_file)
        return
    width = max(map(len, ABOUT))
    for name, about in ABOUT.items():
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
    try:
        write_whole(path, text)
    except OSError as error:
        raise RequestError(str(path), error.strerror or str(error), "choose a place that can be written") from error
    _said(path)


def _said(path: Path) -> None:
    print(f"wrote {path}", file=sys.stderr)


def _only(option: str, items: list[Any]) -> Any:
    if len(items) > 1:
        raise RequestError(option, f"writes one schedule, but {len(items)} are named", "name one")
    return items[0]


def _check_picture(option: str, path: Path) -> None:
    from raypipe.observe.draw.figures import check_format

    try:
        check_format(path)
    except RequestError as error:
        raise RequestError(option, error.why, error.fix) from None
