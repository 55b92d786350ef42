"""Translate pydantic's validation errors into the terms of the YAML file's author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raypipe.errors import SpecError, nearest
from raypipe.files import short

UNKNOWN = ("extra_forbidden", "invalid_key")
"""Pydantic's error types for unknown keys; the second one is for keys that are not text."""

WANTED = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list of two numbers",
}
"""Pydantic's description of an expected value -> ours."""

Data = TypeVar("Data", bound=BaseModel)

Kinds = Mapping[str, Mapping[str, type[BaseModel]]]
"""Sections that have several kinds: section -> kind -> spec."""


def checked(mapping: object, root: type[Data], where: str, example: str) -> Data:
    """Check a whole file given as plain data (as YAML gives it); return it as a ``root``.

    Args:
        mapping: the data.
        root: the spec of the whole file.
        where: the data's origin, for errors.
        example: a file that shows how it should look.

    Raises:
        SpecError: the most basic problem found; ``where`` names the origin and the key.
    """
    if not isinstance(mapping, Mapping):
        raise SpecError(where, f"holds {describe(mapping)} instead of keys and values", f"see {example}")
    try:
        return root.model_validate(dict(mapping))
    except ValidationError as invalid:
        key, why, fix = first_problem(invalid, root, example)
        raise SpecError(f"{where}: {key}", why, fix) from None


def first_problem(
    invalid: ValidationError, root: type[BaseModel], example: str, kinds: Kinds | None = None
) -> tuple[str, str, str]:
    """Return (key path, why, fix) of the most basic problem; unknown keys come first, because they often cause others.

    Args:
        invalid: pydantic's error.
        root: the spec of the whole file.
        example: a correct file to point to.
        kinds: the sections that are discriminated unions.
    """
    found = sorted(invalid.errors(), key=lambda e: e["type"] not in UNKNOWN)
    if not found[0]["loc"]:
        return "", f"holds {describe(found[0]['input'])} instead of keys and values", f"see {example}"
    return _explain(found[0], root, example, kinds or {})


def _explain(error: ErrorDetails, root: type[BaseModel], example: str, kinds: Kinds) -> tuple[str, str, str]:
    # For a union, pydantic adds the name of each member to the path, as in "literal['none', 'full']".
    loc = tuple(short(part) for part in map(str, error["loc"]) if part == "[key]" or not part.endswith("]"))
    options = kinds.get(loc[0], {})
    chosen = loc[1] if options and len(loc) > 1 else None
    if chosen is not None:  # pydantic adds the kind of the section to the path; the file does not have it
        loc = (loc[0], *loc[2:])
    key, kind, given = ".".join(loc), error["type"], error["input"]
    if kind in UNKNOWN:
        elsewhere = [k for k, spec in options.items() if k != chosen and loc[-1] in _keys(spec)]
        if elsewhere:
            why = f"unknown key for a {loc[0]} of kind {chosen}; it belongs to the kind {elsewhere[0]}"
            return key, why, "leave it out"
        owner = options[chosen] if chosen is not None else _spec_at(loc[:-1], root)
        return key, "unknown key", nearest(loc[-1], _keys(owner))
    if kind == "string_too_short":
        return key, "is empty", "give a value"
    if kind == "missing" and loc[-1].isdigit():
        return ".".join(loc[:-1]), f"has {len(given)} values", "give a list of two numbers"
    if kind == "missing":
        shows = "is" if example.startswith("what ") else "shows"
        return key, "missing", f"add it; {example} {shows} a whole {_noun(root)}"
    wanted = error["msg"].removeprefix("Input should be ")
    why = f"is {describe(given)}"
    if kind == "literal_error":
        expected = str(error.get("ctx", {}).get("expected", ""))
        words = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
        if loc[-1] == "[key]":  # the key of a mapping, not a value
            return ".".join(loc[:-2]), f'has the unknown key "{given}"', nearest(str(given), words)
        return key, why, nearest(given, words) if isinstance(given, str) else "use " + ", ".join(words)
    if kind in ("model_type", "dict_type"):
        return key, why, f"give keys and values, as in {example}"
    if kind == "string_pattern_mismatch":
        return key, why, "use letters, digits, dot, dash and underscore; start with a letter or a digit"
    if loc[-1] == "[key]":
        return (
            ".".join(loc[:-2]),
            f'has the key "{given}"',
            f"use keys that are {WANTED.get(wanted.split(',')[0], wanted)}",
        )
    if kind == "too_short":
        return key, "is empty", "give at least one"
    if kind.startswith(("greater_than", "less_than")):
        return key, why, f"give a value {wanted}"
    return key, why, f"give {WANTED.get(wanted, wanted)}"


def _keys(spec: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in spec.model_fields.items()]


def _noun(root: type[BaseModel]) -> str:
    return root.__name__.removesuffix("Spec").lower()


def _spec_at(loc: Sequence[str], root: type[BaseModel]) -> type[BaseModel]:
    """Return the spec class at a key path, also through lists and mappings of specs."""
    owner = root
    for part in loc:
        if part in owner.model_fields:  # otherwise an index of a list or a key of a mapping
            owner = _spec_in(owner.model_fields[part].annotation) or owner
    return owner


def _spec_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for option in get_args(annotation) if (found := _spec_in(option)) is not None), None)


def describe(value: Any) -> str:
    """Describe a value in YAML's terms."""
    if isinstance(value, NoneType):
        return "empty"
    if isinstance(value, Mapping | list):
        return "a list" if isinstance(value, list) else "a group of keys"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**80:
        return "a number of more than 80 digits"  # Python refuses to format very long integers
    return f'the text "{short(value)}"' if isinstance(value, str) else short(str(value))
