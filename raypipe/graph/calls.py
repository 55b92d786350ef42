"""The arguments of a captured operation as JSON data, which can be read without executing any code.

Results of operations are ``{"op": number}``; parameters, buffers, constants and raw inputs are ``{"of": name}``. Values
that JSON cannot represent are ``{"float": "inf"}``, ``{"dtype": "float32"}``, ``{"device": "cpu"}``,
``{"layout": ..}``, ``{"memory_format": ..}``. Other values are stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Plain = Any
"""JSON data."""


class Call(NamedTuple):
    """The arguments of one operation."""

    args: list[Plain]
    kwargs: dict[str, Plain]

    def operands(self) -> tuple[int | str, ...]:
        """Return the numbers of the operations and the names of the sources it reads, in the order of the call."""
        return tuple(_operands([self.args, list(self.kwargs.values())]))

    def renumbered(self, new: Mapping[int, int]) -> Call:
        """Return the same call with new numbers of operations."""
        return Call(_renumbered(self.args, new), _renumbered(self.kwargs, new))


def _operands(value: Plain) -> Iterator[int | str]:
    if isinstance(value, list):
        for item in value:
            yield from _operands(item)
    elif isinstance(value, dict):
        yield from (content for key, content in value.items() if key in ("op", "of"))


def _renumbered(value: Plain, new: Mapping[int, int]) -> Plain:
    if isinstance(value, list):
        return [_renumbered(item, new) for item in value]
    if not isinstance(value, dict):
        return value
    return {"op": new[value["op"]]} if "op" in value else {key: _renumbered(v, new) for key, v in value.items()}
