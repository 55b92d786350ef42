"""Read a profile from a file."""

from __future__ import annotations

from pathlib import Path

from raypipe.cost.profile import Profile
from raypipe.job.json_file import load_json

MADE_BY = "raypipe profile JOB.yaml -o PROFILE.json"


def load_profile(path: Path) -> Profile:
    """Read what ``raypipe profile -o`` wrote.

    Raises:
        SpecError: the file is missing, empty, no JSON, or not a profile; names the first wrong key.
    """
    return load_json(path, Profile, MADE_BY)
