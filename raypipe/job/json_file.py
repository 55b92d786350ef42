"""A JSON file that raypipe writes, read back as its typed data: every way it can be wrong is one SpecError."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from raypipe.errors import SpecError
from raypipe.files import read_regular
from raypipe.job.validation_errors import first_problem

Data = TypeVar("Data", bound=BaseModel)


def load_json(path: Path, root: type[Data], made_by: str) -> Data:
    """Read and check the file.

    Args:
        path: the file.
        root: what it holds.
        made_by: the command that writes such a file, for whoever has to write another one.

    Raises:
        SpecError: the file is missing, empty, no JSON, or holds a wrong key or value; the first one is named.
    """
    again = f"make it with: {made_by}"
    try:
        data = read_regular(path)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", again) from None
    if not data.strip():
        raise SpecError(str(path), "is empty", again)
    try:
        return root.model_validate_json(data)  # by JSON's rules: its lists are our tuples
    except SpecError as error:  # a rule between its keys
        raise SpecError(f"{path}: {error.where}", error.why, error.fix) from None
    except ValidationError as invalid:
        first = invalid.errors()[0]
        if first["type"] == "json_invalid":
            why = first["msg"].removeprefix("Invalid JSON: ")
            raise SpecError(str(path), f"is no JSON, or was cut short: {why}", again) from None
        key, why, fix = first_problem(invalid, root, f"what `{made_by}` writes")
        raise SpecError(f"{path}: {key}" if key else str(path), why, fix) from None
