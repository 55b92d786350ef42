"""Read a profile from a file."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from raypipe.cost.profile import Profile
from raypipe.errors import SpecError

AGAIN = "make it with: raypipe profile JOB.yaml -o PROFILE.json"


def load_profile(path: Path) -> Profile:
    """Read what ``raypipe profile -o`` wrote.

    Raises:
        SpecError: the file is missing, empty, no JSON, or not a profile; names the first wrong key.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", AGAIN) from None
    if not data.strip():
        raise SpecError(str(path), "is empty", AGAIN)
    try:
        return Profile.model_validate_json(data)  # by JSON's rules: its lists are our tuples
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{path}: {key}" if key else str(path), first["msg"], AGAIN) from None
