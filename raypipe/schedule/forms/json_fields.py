"""Values of a decoded JSON document with their paths, so that every error names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from raypipe.errors import ScheduleError, nearest
from raypipe.files import short
from raypipe.schedule.costs import LONGEST

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class Field:
    """The value at ``path`` (such as ``orders[0][3].kind``) of the document ``source``."""

    value: Any
    source: str
    path: str

    @property
    def where(self) -> str:
        """The location for error messages."""
        return f"{self.source}: {self.path}" if self.path else self.source

    def fail(self, why: str, fix: str) -> NoReturn:
        """Raise an error about this value.

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(self.where, why, fix)

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.fail(f"expected an object, found {_short(self.value)}", 'write {"key": value, ...}')
        return self.value

    def only(self, known: Sequence[str]) -> None:
        """Check that all keys are ``known``."""
        for key in self._object():
            if key not in known:
                self.fail(f'unknown key "{short(key)}"', nearest(key, known))

    def get(self, key: str) -> Field | None:
        """Return the value of ``key``; None if it is missing or null."""
        value = self._object().get(key)
        return None if value is None else Field(value, self.source, f"{self.path}.{key}" if self.path else key)

    def need(self, key: str) -> Field:
        """Return the value of a required ``key``."""
        found = self.get(key)
        return self.fail(f'"{key}" is missing', f'add "{key}"') if found is None else found

    def items(self, what: str) -> list[Field]:
        """Return the elements of a list."""
        if not isinstance(self.value, list):
            self.fail(f"expected a list of {what}, found {_short(self.value)}", "write [ ... ]")
        return [Field(v, self.source, f"{self.path}[{i}]") for i, v in enumerate(self.value)]

    def whole(self) -> int:
        """Return a whole number from 0 to 999999; larger ones are typing errors."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value < 1_000_000:
            self.fail(f"{_short(self.value)} is not a whole number from 0 to 999999", "write for example 3")
        return self.value

    def number(self) -> float:
        """Return a finite number >= 0 that is small enough to be summed."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            self.fail(f"{_short(value)} is not a number >= 0", "write for example 1.5")
        if value > 1e3 * LONGEST:  # a task of several micro-batches may take a multiple of LONGEST
            self.fail(f"{_short(value)} is too long: times of a step could not be added up", f"use at most {LONGEST:g}")
        return float(value)

    def per_stage(self, stages: int) -> tuple[float, ...]:
        """Return one number per stage, from a number for all stages or a list."""
        if not isinstance(self.value, list):
            return (self.number(),) * stages
        if len(self.value) != stages:
            self.fail(f"{len(self.value)} values for {stages} stages", f"give 1 or {stages} values")
        return tuple(item.number() for item in self.items("numbers"))

    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            self.fail(f"{_short(self.value)} is not text", 'write "..."')
        return self.value

    def flag(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            self.fail(f"{_short(self.value)} is neither true nor false", "write true or false")
        return self.value

    def choice(self, known: tuple[Word, ...]) -> Word:
        """Return one of the ``known`` strings."""
        for each in known:
            if each == self.value:
                return each
        return self.fail(f"unknown value {_short(self.value)}", nearest(str(self.value), known))

    def fraction(self) -> Fraction:
        """Return a share above 0 and at most 1, given as text such as ``"1/2"`` or as a number."""
        try:
            # Exponents in text are refused, because they may be huge; those of a float are bounded.
            found = Fraction(str(self.value)) if _plain(self.value) else Fraction(0)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{_short(self.value)} is not a fraction", 'write for example "1/2"')
        if not 0 < found <= 1:
            self.fail(f"{_short(self.value)} is not a share", 'use more than 0 and at most 1, as in "1/2"')
        return found


def _plain(value: object) -> bool:
    return not isinstance(value, str) or (len(value) <= 40 and "e" not in value.lower())


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"  # Python refuses to write out very long ones
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
