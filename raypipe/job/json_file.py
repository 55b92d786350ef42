"""Read JSON files that raypipe writes as typed data; everything wrong with a file becomes one SpecError."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from raypipe.errors import SpecError
from raypipe.files import parse_json, read_regular
from raypipe.job.validation_errors import first_problem

Data = TypeVar("Data", bound=BaseModel)


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
        found = root.model_validate_json(data)  # JSON mode accepts lists for tuples
        parse_json(data)  # which is stricter: pydantic takes the last of several equal keys
        return found
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
