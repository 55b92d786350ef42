"""One value of a decoded JSON document that knows its place, so that every complaint names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import LONGEST

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class Field:
    """``value`` at ``path`` (as in ``orders[0][3].kind``) of the document ``source``."""

    value: Any
    source: str
    path: str

    @property
    def where(self) -> str:
        """The place as messages name it."""
        return f"{self.source}: {self.path}" if self.path else self.source

    def fail(self, why: str, fix: str) -> NoReturn:
        """Refuse this value.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(self.where, why, fix)

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.fail(f"expected an object, found {_short(self.value)}", 'write {"key": value, ...}')
        return self.value

    def only(self, known: Sequence[str]) -> None:
        """Refuse keys that aren't ``known``, naming the nearest one."""
        for key in self._object():
            if key not in known:
                self.fail(f'unknown key "{key}"', nearest(key, known))

    def get(self, key: str) -> Field | None:
        """The value of ``key``, None if it is missing or null."""
        value = self._object().get(key)
        return None if value is None else Field(value, self.source, f"{self.path}.{key}" if self.path else key)

    def need(self, key: str) -> Field:
        """The value of ``key``, which must be there."""
        found = self.get(key)
        return self.fail(f'"{key}" is missing', f'add "{key}"') if found is None else found

    def items(self, what: str) -> list[Field]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            self.fail(f"expected a list of {what}, found {_short(self.value)}", "write [ ... ]")
        return [Field(v, self.source, f"{self.path}[{i}]") for i, v in enumerate(self.value)]

    def whole(self) -> int:
        """A whole number from 0 to 999999 (more is a typing error)."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value < 1_000_000:
            self.fail(f"{_short(self.value)} is not a whole number from 0 to 999999", "write for example 3")
        return self.value

    def number(self) -> float:
        """A finite number, 0 or more, that can be added up."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            self.fail(f"{_short(value)} is not a number >= 0", "write for example 1.5")
        if value > 1e3 * LONGEST:  # a task's own time is that of several
            self.fail(f"{_short(value)} is too long: times of a step could not be added up", f"use at most {LONGEST:g}")
        return float(value)

    def per_stage(self, stages: int) -> tuple[float, ...]:
        """One number for all stages, or a list with one for each."""
        if not isinstance(self.value, list):
            return (self.number(),) * stages
        if len(self.value) != stages:
            self.fail(f"{len(self.value)} values for {stages} stages", f"give 1 or {stages} values")
        return tuple(item.number() for item in self.items("numbers"))

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            self.fail(f"{_short(self.value)} is not text", 'write "..."')
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail(f"{_short(self.value)} is neither true nor false", "write true or false")
        return self.value

    def choice(self, known: tuple[Word, ...]) -> Word:
        """One of a few words."""
        for each in known:
            if each == self.value:
                return each
        return self.fail(f"unknown value {_short(self.value)}", nearest(str(self.value), known))

    def fraction(self) -> Fraction:
        """A share, above 0 and at most 1: ``"1/2"``, or a number."""
        try:
            # No exponents in texts: they may be huge. A float has its own, which are not.
            found = Fraction(str(self.value)) if _plain(self.value) else Fraction(0)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{_short(self.value)} is not a fraction", 'write for example "1/2"')
        if not 0 < found <= 1:
            self.fail(f"{_short(self.value)} is no share", 'use more than 0 and at most 1, as in "1/2"')
        return found


def _plain(value: object) -> bool:
    return not isinstance(value, str) or (len(value) <= 40 and "e" not in value.lower())


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"  # Python refuses to write out very long ones
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
