"""From a job file to a checked ``JobSpec``: every way it can be wrong is one SpecError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raypipe.errors import SpecError, nearest
from raypipe.job.spec import JobSpec
from raypipe.job.yaml_text import parse_yaml

PLANNED = {
    ("model", "hf"): ("Hugging Face models are not available yet", "use model: {type: gpt, ...}"),
    ("model", "config"): ("Hugging Face models are not available yet", "use model: {type: gpt, ...}"),
}
"""Keys that CONTRACT.md promises and that do not work yet: (why, fix)."""

UNKNOWN = ("extra_forbidden", "invalid_key")
"""Pydantic's kinds of error for a key that isn't known; the second is one that isn't even text."""

WANTED = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list of two numbers",
}
"""Pydantic's words for what belongs in a field, as a writer of YAML would say them."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file, apply ``key.path=value`` overrides (value in YAML) and check the whole.

    Raises SpecError, whose ``where`` is the file and the key, or ``--set key`` where an override is to blame.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        found = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = nearest(path.name, found) if found else "give the path of a job file, such as jobs/quickstart.yaml"
        raise SpecError(str(path), "no such file", hint) from None
    except IsADirectoryError:
        raise SpecError(str(path), "is a folder", "give the path of a job file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(path), f"can't be read as text: {error}", "give a readable YAML file") from None
    return job_from(parse_yaml(text, str(path)), str(path), overrides)


def job_from(mapping: object, where: str = "job", overrides: Sequence[str] = ()) -> JobSpec:
    """Check a job given as plain data (as YAML gives it); ``where`` names its origin in errors.

    Raises SpecError for the first problem found; unknown keys come first, as they often explain the rest.
    """
    if not isinstance(mapping, Mapping):
        raise SpecError(where, f"holds {_describe(mapping)} instead of keys and values", "see jobs/quickstart.yaml")
    data, overridden = _with_overrides(mapping, overrides)

    def place(key: str) -> str:
        culprit = next((k for k in overridden if f"{key}.".startswith(f"{k}.")), None)
        return f"--set {key}" if culprit else f"{where}: {key}"

    if data.get("parallel") == "auto":
        raise SpecError(place("parallel"), "auto is not available yet", "give schedule, stages, replicas, microbatch")
    try:
        return JobSpec.model_validate(data)
    except SpecError as error:
        raise SpecError(place(error.where), error.why, error.fix) from None
    except ValidationError as invalid:
        found = sorted(invalid.errors(), key=lambda e: e["type"] not in UNKNOWN)
        key, why, fix = _explain(found[0])
        raise SpecError(place(key), why, fix) from None


def _with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """A copy of the mapping with ``key.path=value`` set, and the keys that were set."""
    data: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}
    seen: set[str] = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise SpecError(f"--set {text}", "is not key.path=value", "for example --set train.steps=100")
        inner = data
        for part in parts[:-1]:
            step = inner.setdefault(part, {})
            if not isinstance(step, dict):
                raise SpecError(f"--set {key}", f'"{part}" is a value and holds no keys', "check the key's path")
            inner = step
        inner[parts[-1]] = parse_yaml(value, f"--set {key}")
        seen.add(".".join(parts))
    return data, seen


def _explain(error: ErrorDetails) -> tuple[str, str, str]:
    """(key path, why, fix) of one of pydantic's findings."""
    loc = tuple(str(part) for part in error["loc"])
    key, kind, given = ".".join(loc), error["type"], error["input"]
    if kind in UNKNOWN:
        if loc in PLANNED:
            return key, *PLANNED[loc]
        owner = _spec_at(loc[:-1])
        return key, "unknown key", nearest(loc[-1], owner.model_fields)
    if kind == "string_too_short":
        return key, "is empty", "give a value"
    if kind == "missing" and loc[-1].isdigit():
        return ".".join(loc[:-1]), f"has {len(given)} values", "give a list of two numbers"
    if kind == "missing":
        return key, "missing", "add it; jobs/quickstart.yaml shows a whole job"
    wanted = error["msg"].removeprefix("Input should be ")
    why = f"is {_describe(given)}"
    if kind == "literal_error":
        expected = str(error.get("ctx", {}).get("expected", ""))
        options = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
        return key, why, nearest(given, options) if isinstance(given, str) else "use " + ", ".join(options)
    if kind == "model_type":
        return key, why, "give keys and values, as in jobs/quickstart.yaml"
    if kind == "string_pattern_mismatch":
        return key, why, "use letters, digits, dot, dash and underscore; start with a letter or a digit"
    if kind.startswith(("greater_than", "less_than")):
        return key, why, f"give a value {wanted}"
    return key, why, f"give {WANTED.get(wanted, wanted)}"


def _spec_at(loc: Sequence[str]) -> type[BaseModel]:
    """The spec class that a key path leads to."""
    owner: type[BaseModel] = JobSpec
    for part in loc:
        annotation = owner.model_fields[part].annotation
        options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        owner = next(t for t in options if isinstance(t, type) and issubclass(t, BaseModel))
    return owner


def _describe(value: object) -> str:
    """A value as a reader of YAML would name it."""
    if isinstance(value, NoneType):
        return "empty"
    if isinstance(value, Mapping | list):
        return "a list" if isinstance(value, list) else "a group of keys"
    if isinstance(value, bool):
        return str(value).lower()
    return f'the text "{value}"' if isinstance(value, str) else str(value)
