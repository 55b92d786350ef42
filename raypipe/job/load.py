"""From a job file to a checked ``JobSpec``: every way it can be wrong is one SpecError."""

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
"""A whole job, for whoever wonders how one looks."""
MOST_BYTES = 128 << 10
"""Of a job or a cluster file: a hundred times what such files take, and read within seconds."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file, apply ``key.path=value`` overrides (value in YAML) and check the whole.

    Raises SpecError, whose ``where`` is the file and the key, or ``--set key`` where an override is to blame.
    """
    text = read_text(Path(path), "job", EXAMPLE)
    return job_from(parse_yaml(text, str(path)), str(path), overrides)


def read_text(path: Path, what: str, example: str) -> str:
    """The text of a ``what`` file such as ``example``; raises SpecError for one that is not there or no text."""
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

    Raises SpecError for the first problem found; unknown keys come first, as they often explain the rest.
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
    """A copy of the mapping with ``key.path=value`` set, and the keys that were set."""
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
