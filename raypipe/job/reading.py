"""Read YAML and JSON files as typed data; everything wrong with one becomes a SpecError in its author's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raypipe.errors import SpecError, nearest
from raypipe.files import parse_json, read_regular, short

MOST_BYTES = 128 << 10
"""Largest size of a job or cluster file: a hundred times what such files take, and still read within seconds."""
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
    result = sorted(invalid.errors(), key=lambda e: e["type"] not in UNKNOWN)
    if not result[0]["loc"]:
        return "", f"holds {describe(result[0]['input'])} instead of keys and values", f"see {example}"
    return _explain(result[0], root, example, kinds or {})


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
        return key, "missing", f"add it; {example} {shows} a whole {root.__name__.removesuffix('Spec').lower()}"
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
    return next((result for option in get_args(annotation) if (result := _spec_in(option)) is not None), None)


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


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the two corrections and a limit on the expansion of aliases."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)  # before construction, since merge keys (<<) copy what they refer to
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the safe loader refuses what can't be a key
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key.value}" is given twice', key.start_mark
                )
            seen.add(key.value)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1, which PyYAML follows, requires a dot in every float, so 1e-3 would be a string.
_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)

MOST_VALUES = 100_000
"""Limit on the values of one text with aliases expanded: nested aliases can stand for more than any memory holds."""
DEEPEST = 50
"""Limit on the nesting of lists and mappings: several times what any key needs."""
TOO_DEEP = f"nested more than {DEEPEST} deep"


def parse_yaml(text: str, where: str) -> object:
    """Return the plain data in a YAML text; ``where`` names its origin in errors.

    Raises:
        SpecError: the text is not valid YAML; it names line and column of a syntax error.

    >>> parse_yaml("{lr: 1e-3, clip: null}", "example")
    {'lr': 0.001, 'clip': None}
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        spot = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise SpecError(spot, f"not valid YAML: {error.problem or error.context}", "correct the line") from None
    except RecursionError:
        raise SpecError(where, f"not valid YAML: {TOO_DEEP}", "correct the brackets") from None
    except Exception as error:  # PyYAML lets any error through, for example of an impossible date or a wrong !!bool
        why = str(error) if isinstance(error, (yaml.YAMLError, ValueError)) else "a value is not what its tag says"
        raise SpecError(where, f"not valid YAML: {why}", "correct the file") from None


def _check_size(root: yaml.Node) -> None:
    """Refuse more than ``MOST_VALUES`` values or ``DEEPEST`` levels, counted with aliases expanded."""
    sizes: dict[int, tuple[int, int] | None] = {}  # by identity: (values, levels); None while being counted
    todo = [root]
    while todo:
        node = todo[-1]
        inner = _inner(node)
        if id(node) not in sizes:
            sizes[id(node)] = None
            for child in inner:
                if id(child) not in sizes:
                    todo.append(child)
                elif sizes[id(child)] is None:
                    _refuse("an alias refers to a value that contains it", child)
            continue
        todo.pop()
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # half a pair of surrogates is no character: writing or printing it would fail
        if sizes[id(node)] is None:
            result = [sizes[id(child)] or (0, 0) for child in inner]
            size, levels = 1 + sum(s for s, _ in result), 1 + max((depth for _, depth in result), default=0)
            if size > MOST_VALUES:
                _refuse(f"more than {MOST_VALUES} values with aliases expanded", node)
            if levels > DEEPEST:
                _refuse(TOO_DEEP, node)
            sizes[id(node)] = size, levels


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refuse(why: str, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)


def load_json(path: Path, root: type[Data], made_by: str) -> Data:
    """Read and check a file.

    Args:
        path: the file.
        root: the model of its content.
        made_by: the command that writes such a file, for error messages.

    Raises:
        SpecError: the file is missing, empty, not JSON, or holds a wrong key or value; it names the first one.
    """
    fix = f"make it with: {made_by}"
    try:
        data = read_regular(path)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", fix) from None
    if not data.strip():
        raise SpecError(str(path), "is empty", fix)
    try:
        result = root.model_validate_json(data)  # JSON mode accepts lists for tuples
        parse_json(data)  # which is stricter: pydantic takes the last of several equal keys
        return result
    except SpecError as error:  # a rule between keys
        raise SpecError(f"{path}: {error.where}", error.why, error.fix) from None
    except ValidationError as invalid:
        first = invalid.errors()[0]
        if first["type"] == "json_invalid":
            why = first["msg"].removeprefix("Invalid JSON: ")
            raise SpecError(str(path), f"is not valid JSON, or was cut short: {why}", fix) from None
        key, why, remedy = first_problem(invalid, root, f"what `{made_by}` writes")
        raise SpecError(f"{path}: {key}" if key else str(path), why, remedy) from None
    except ValueError as error:
        raise SpecError(str(path), f"is not valid JSON, or was cut short: {error}", fix) from None


def read_text(path: Path, what: str, example: str) -> str:
    """Return the text of a file; ``what`` (such as "job") and ``example`` are used in error messages.

    Raises:
        SpecError: the file is missing, cannot be read or is not text.
    """
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        result = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = nearest(path.name, result) if result else f"give the path of a {what} file, such as {example}"
        raise SpecError(str(path), "no such file", hint) from None
    except IsADirectoryError:
        raise SpecError(str(path), "is a folder", f"give the path of a {what} file in it") from None
    except OSError as error:
        why = f"can't be read: {error.strerror or error}"
        raise SpecError(str(path), why, f"give the path of a {what} file, such as {example}") from None
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"can't be read as text: {error}", "give a readable YAML file") from None
