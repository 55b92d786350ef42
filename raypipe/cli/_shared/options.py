"""Options that several verbs share: the shape of a schedule and how ``auto`` searches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typing_extensions import get_type_hints

from raypipe.schedule.shape import OPTIONS, Shape

Text = Optional[str]  # noqa: UP045 - Typer reads annotations at run time, on Python 3.10 too
File = Optional[Path]  # noqa: UP045
Texts = Mapping[str, Text]
"""What was given for a group of options; None for one that was not."""

SHAPE: dict[str, Any] = {
    f.name: Annotated[Text, typer.Option(metavar=f.metadata["metavar"], help=f.metadata["help"])]
    for f in sorted(fields(Shape), key=lambda f: f.name in OPTIONS)
}
"""An option for each field of a ``Shape``."""
SEARCH: dict[str, Any] = {
    "placement": Annotated[Text, typer.Option(metavar="WHERE", help="auto: line, ring, v or bidirectional [line].")],
    "objective": Annotated[Text, typer.Option(metavar="WHAT", help="auto: makespan, span or period [makespan].")],
    "budget": Annotated[Text, typer.Option(metavar="SECONDS", help="auto: time of the search [by size].")],
    "backward": Annotated[Text, typer.Option(metavar="HOW", help="auto: split or joint [split].")],
    "recompute_stages": Annotated[
        Text, typer.Option(metavar="WHICH", help="auto: auto, none, all or stages 0,1,.. [auto if --recompute > 0].")
    ],
}
"""How ``auto`` searches."""
SHARDING: dict[str, Any] = {
    "zero": Annotated[
        Text, typer.Option(metavar="LEVEL", help="Shard over data-parallel copies: 0 to 3, or a list, one per stage.")
    ],
    "gather": Annotated[
        Text, typer.Option(metavar="HOW", help="With --zero: gather per step, unit or microbatch [unit].")
    ],
    "ahead": Annotated[
        Text, typer.Option(metavar="N", help="With --zero: tasks by which gathers are issued early [1].")
    ],
}
"""How a schedule is sharded."""


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
