"""Read a job file as a checked ``JobSpec``; everything wrong with it becomes one SpecError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raypipe.errors import SpecError, nearest
from raypipe.files import read_regular, short
from raypipe.job.model_spec import MODEL_KINDS
from raypipe.job.spec import JobSpec
from raypipe.job.validation_errors import describe, first_problem
from raypipe.job.yaml_text import parse_yaml

EXAMPLE = "jobs/quickstart.yaml"
"""A complete job file that errors point to."""
MOST_BYTES = 128 << 10
"""Largest size of a job or cluster file: a hundred times what such files take, and still read within seconds."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file, apply ``key.path=value`` overrides (with values in YAML) and check the result.

    Raises:
        SpecError: ``where`` is the file and the key, or ``--set key`` if an override is wrong.
    """
    text = read_text(Path(path), "job", EXAMPLE)
    return job_from(parse_yaml(text, str(path)), str(path), overrides)


def read_text(path: Path, what: str, example: str) -> str:
    """Return the text of a file; ``what`` (such as "job") and ``example`` are used in error messages.

    Raises:
        SpecError: the file is missing, cannot be read or is not text.
    """
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        found = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        hint = nearest(path.name, found) if found else f"give the path of a {what} file, such as {example}"
        raise SpecError(str(path), "no such file", hint) from None
    except IsADirectoryError:
        raise SpecError(str(path), "is a folder", f"give the path of a {what} file in it") from None
    except OSError as error:
        why = f"can't be read: {error.strerror or error}"
        raise SpecError(str(path), why, f"give the path of a {what} file, such as {example}") from None
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"can't be read as text: {error}", "give a readable YAML file") from None


def job_from(mapping: object, where: str = "job", overrides: Sequence[str] = ()) -> JobSpec:
    """Check a job given as plain data (as YAML gives it); ``where`` names its origin in errors.

    Raises:
        SpecError: the first problem found; unknown keys come first, because they often cause the others.
    """
    if not isinstance(mapping, Mapping):
        raise SpecError(where, f"holds {describe(mapping)} instead of keys and values", f"see {EXAMPLE}")
    data, overridden = _with_overrides(mapping, overrides)

    def place(key: str) -> str:
        culprit = next((k for k in overridden if f"{key}.".startswith(f"{k}.")), None)
        return f"--set {key}" if culprit else f"{where}: {key}"

    try:
        return JobSpec.model_validate(data)
    except SpecError as error:
        raise SpecError(place(error.where), error.why, error.fix) from None
    except ValidationError as invalid:
        key, why, fix = first_problem(invalid, JobSpec, EXAMPLE, {"model": MODEL_KINDS})
        raise SpecError(place(key), why, fix) from None


def _with_overrides(mapping: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Return a copy of the mapping with ``key.path=value`` set, and the keys that were set."""
    data: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}
    seen: set[str] = set()
    for text in overrides:
        if data.get("parallel") == "auto":
            data["parallel"] = {"auto": True}  # so that single keys can be set
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise SpecError(f"--set {short(text)}", "is not key.path=value", "for example --set train.steps=100")
        inner = data
        for part in parts[:-1]:
            step = inner.setdefault(part, {})
            if not isinstance(step, dict):
                raise SpecError(f"--set {key}", f'"{part}" is a value and holds no keys', "check the key's path")
            inner = step
        inner[parts[-1]] = parse_yaml(value, f"--set {key}")
        seen.add(".".join(parts))
    return data, seen
