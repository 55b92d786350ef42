"""Settings of a trainer's file, by name: command-line arguments, or nested keys with dots between them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from raypipe.errors import SpecError, nearest

T = TypeVar("T")


class Settings:
    """The settings of a file.

    Args:
        source: the file's name, for messages.
        values: a value, or several, by name; a flag has none.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source, self.values = source, dict(values)

    @classmethod
    def of_arguments(cls, text: str, source: str) -> Settings:
        """Read command-line arguments; a word without dashes before it, such as torchtitan's ``none``, is a flag.

        Raises:
            SpecError: a quotation has no end.
        """
        found: dict[str, Any] = {}
        key = None
        try:
            words = shlex.split(text, comments=True)
        except ValueError as error:
            raise SpecError(source, f"is no list of arguments: {error}", "give a file that --emit wrote") from None
        for word in words:
            if word.startswith("--"):
                key, _, value = word.removeprefix("--").partition("=")
                found[key] = [value] if value else []
            elif key is None or (":" in word and "," not in word):
                found[word] = []
            else:
                found[key].append(word)
        return cls(source, {key: values[0] if len(values) == 1 else values for key, values in found.items()})

    @classmethod
    def of_keys(cls, nested: Mapping[str, Any], source: str) -> Settings:
        """Read nested keys."""
        return cls(source, dict(_flat(nested, "")))

    def fail(self, key: str, why: str, fix: str) -> SpecError:
        """Return the error of a setting."""
        return SpecError(f"{self.source}: {key}", why, fix)

    def whole(self, key: str, default: int | None = 1) -> int:
        """Return a whole number from 1.

        Raises:
            SpecError: the setting is another value, or is missing and has no default.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing", "give it")
            return default
        try:
            found = int(str(value))
        except ValueError:
            found = 0
        if found < 1:
            raise self.fail(key, f"is {value!r}, no number from 1", "give a whole number from 1")
        return found

    def flag(self, key: str) -> bool:
        """Return whether a flag is set."""
        value = self.values.get(key, False)
        return value == [] or value is True or str(value).lower() == "true"

    def choice(self, key: str, words: Mapping[str, T], default: T) -> T:
        """Return what a word means.

        Raises:
            SpecError: the word is unknown.
        """
        value = self.values.get(key)
        if value is None:
            return default
        known = {word.lower(): meant for word, meant in words.items()}
        if str(value).lower() not in known:
            raise self.fail(key, f'"{value}" is not expressible here', nearest(str(value), words))
        return known[str(value).lower()]

    def refuse(self, *keys: str) -> None:
        """Check that settings that raypipe has nothing like are 1 or missing.

        Raises:
            SpecError: one is not.
        """
        for key in keys:
            if self.whole(key) > 1:
                raise self.fail(key, f"is {self.values[key]}, and no plan divides that", "set it to 1")

    def divided(self, key: str, devices: int, by: int) -> int:
        """Return the data-parallel copies of ``devices``, groups of ``by`` devices.

        Raises:
            SpecError: they do not divide.
        """
        if devices % by:
            raise self.fail(key, f"{devices} devices are no multiple of {by}", "give other --devices")
        return devices // by


def _flat(nested: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        yield before + str(key), value
