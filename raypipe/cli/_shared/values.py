"""Parse option values: comma-separated lists, and options whose value may be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from raypipe.errors import RequestError
from raypipe.files import short

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
    found: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left]
        if word == option:
            own = bool(left) and not left[0].startswith("-") and left[0] not in words
            word = f"{option}={left.pop(0)}" if own else f"{option}={STANDARD_OUTPUT}"
        found.append(word)
    return found
