"""Options that several verbs share, what reads their values, and the files that they name."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer
from typing_extensions import get_type_hints

from raypipe.errors import RequestError, SpecError
from raypipe.files import is_url, short, strict_json, write_whole
from raypipe.schedule.shape import OPTIONS, Shape

Text = Optional[str]  # noqa: UP045 - Typer reads annotations at run time, on Python 3.10 too
File = Optional[Path]  # noqa: UP045
Texts = Mapping[str, Text]
"""What was given for a group of options; None for one that was not."""


def _group(**options: tuple[str, str]) -> dict[str, Any]:
    """Return a group of options by name, each given as its metavar and its help."""
    return {key: Annotated[Text, typer.Option(metavar=name, help=about)] for key, (name, about) in options.items()}


SHAPE = _group(
    **{
        f.name: (f.metadata["metavar"], f.metadata["help"])
        for f in sorted(fields(Shape), key=lambda f: f.name in OPTIONS)
    }
)
"""An option for each field of a ``Shape``."""
SEARCH = _group(
    placement=("WHERE", "auto: line, ring, v, bidirectional or encoder [line]."),
    objective=("WHAT", "auto: makespan, span or period [makespan]."),
    budget=("SECONDS", "auto: time of the search [by size]."),
    backward=("HOW", "auto: split or joint [split]."),
    recompute_stages=("WHICH", "auto: auto, none, all or stages 0,1,.. [auto if --recompute > 0]."),
)
"""How ``auto`` searches."""
SHARDING = _group(
    zero=("LEVEL", "Shard over data-parallel copies: 0 to 3, or a list, one per stage."),
    gather=("HOW", "With --zero: gather per step, unit or microbatch [unit]."),
    ahead=("N", "With --zero: tasks by which gathers are issued early [1]."),
)
"""How a schedule is sharded."""
SHARDING_COSTS = _group(gather_time=("T", "AG, with --zero [0]."), reduce_scatter_time=("T", "RS, with --zero [0]."))


def cost_options(unit: str, usual: str) -> dict[str, Any]:
    """Return the options for the costs of tasks, in a unit, with the default of F, B and W."""
    return _group(
        forward=(unit, f"F [{usual}]; a number or a list, one per stage."),
        input_grad=(unit, f"B [{usual}]; BW is B plus W."),
        weight_grad=(unit, f"W [{usual}]."),
        recompute=(unit, "R [0]."),
        attention=(unit, "With --slices: the part of F that grows along the sequence [0]."),
        attention_grad=(unit, "With --slices: the part of B that grows along the sequence [0]."),
        dispatch=(unit, "The part of F and of B in which tokens travel to experts; pairs hide it [0]."),
        combine=(unit, "The part in which experts' results travel back [0]."),
        comm=(unit, "Message latency [0]; a list: per link s to s+1, both ways."),
    )


def grouped(**groups: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a parameter of a verb stand for several options: it gets their ``Texts``.

    Typer sees the options where the parameter stands; a key added to a shape is an option of every such verb.

    Args:
        groups: parameter -> its options, as Typer's annotations by name.
    """

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(verb, include_extras=True)
        own = inspect.signature(verb).parameters
        parameters = [
            inspect.Parameter(
                key,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if name in groups else own[name].default,
                annotation=hint,
            )
            for name in own
            for key, hint in groups.get(name, {name: hints[name]}).items()
        ]

        @functools.wraps(verb)
        def called(**given: Any) -> None:
            verb(**{name: {key: given[key] for key in groups[name]} if name in groups else given[name] for name in own})

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return wrap


STANDARD_OUTPUT = Path("-")
"""Value of an option with an optional FILE if the FILE is left out."""
DAY_S = 86400.0
"""Longest time of a search, in seconds: a day."""
Value = TypeVar("Value")
NOUNS: dict[object, str] = {int: "a whole number", float: "a number"}


def comma_list(option: str, text: str, kind: Callable[[str], Value]) -> list[Value]:
    """Parse a list such as ``"1,2,3"``.

    Raises:
        RequestError: an item is not a ``kind``; it names the option and the item.

    >>> comma_list("--forward", "1,2.5", float)
    [1.0, 2.5]
    """
    values = []
    for item in text.split(","):
        try:
            values.append(kind(item.strip()))
        except ValueError as error:
            noun = NOUNS.get(kind, "valid")
            raise RequestError(
                option, f'"{short(item.strip())}" is not {noun}', f"write for example {option} 1"
            ) from error
    return values


def optional_value(argv: Sequence[str], option: str, words: Sequence[str]) -> list[str]:
    """Fill in the value of an option whose value is optional.

    The parser supports only options with and without a value. ``--json`` at the end, before another option, or before
    one of ``words`` (names that the verb expects as arguments) becomes ``--json=-``; otherwise the next argument is
    its value.

    >>> optional_value(["--json", "1f1b"], "--json", ["1f1b"])
    ['--json=-', '1f1b']
    >>> optional_value(["1f1b", "--json", "out.json", "--json"], "--json", ["1f1b"])
    ['1f1b', '--json=out.json', '--json=-']
    """
    result: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*result, word, *left]
        if word == option:
            own = bool(left) and not left[0].startswith("-") and left[0] not in words
            word = f"{option}={left.pop(0)}" if own else f"{option}={STANDARD_OUTPUT}"
        result.append(word)
    return result


OTHER = "give another file"


def output(option: str) -> Callable[[str], Path]:
    """Return a parser for an option that names a file or directory to write.

    The parser raises a SpecError for an empty name, which ``Path`` would take for the current folder, and for a URL,
    which it would take for a folder.
    """

    def read(text: str) -> Path:
        if not text.strip():
            raise SpecError(option, "is empty", "give a path")
        if is_url(text):
            raise SpecError(
                option, f"{text} is a URL, but only local paths can be written", "give a local path, then copy the file"
            )
        if "\0" in text:
            raise SpecError(option, "contains a NUL character", "give a path")
        return Path(text)

    return read


def check_writable(*paths: Path | None) -> None:
    """Check that the files that are given can be written, before anything is computed for them.

    Raises:
        SpecError: its folder does not exist, it is a folder itself, or there is no permission.
    """
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        if path.is_dir():
            raise SpecError(str(path), "is a folder", "give the file's name too")
        if not path.parent.is_dir():
            raise SpecError(str(path), "there is no such folder", "make it, or give another file")
        # A file is written beside its place and then moved there, which takes permission for both.
        places = [path, path.parent] if path.is_file() else [path if path.exists() else path.parent]
        if not all(os.access(place, os.W_OK) for place in places):
            raise SpecError(str(path), "can't be written: no permission", OTHER)


def write(path: Path, text: str) -> None:
    """Write text to a file.

    Raises:
        SpecError: the system cannot write it, for example because the disk is full.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecError(str(path), f"can't be written: {error.strerror}", OTHER) from None


def described_cluster(name: str) -> Path:
    """``--cluster`` as it was typed: the path or the name of a description; tells where it is now if it has moved."""
    from raypipe.job.cluster import cluster_file, moved_note

    if (note := moved_note(Path(name))) is not None:
        print(note, file=sys.stderr)
    return cluster_file(Path(name))


def say(text: str) -> None:
    """Print a line of progress to standard error, since standard output is for results."""
    from raypipe.observe.progress import Notes, stderr_console

    Notes(stderr_console())(text)


JobFile = Annotated[Path, typer.Argument(help="Job file, such as jobs/quickstart.yaml.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", help="Override a key of the job file: key.path=value; repeatable."),
]
RunDir = Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-20260101-120000.")]
JsonFile = Annotated[
    File, typer.Option("--json", parser=output("--json"), metavar="[FILE]", help="The result as one JSON object.")
]
Cluster = Annotated[
    File,
    typer.Option(
        metavar="FILE", parser=described_cluster, help="Compute costs for this cluster's devices [this machine's]."
    ),
]


def emit(value: object, file: Path) -> None:
    """Write the JSON of a result to the FILE of ``--json``, and to standard output in any case."""
    text = strict_json(value)
    if file != STANDARD_OUTPUT:
        write(file, text + "\n")
    print(text)
