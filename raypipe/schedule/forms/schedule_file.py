"""Read a schedule file in either form: JSON if it starts with a brace, else text."""

from __future__ import annotations

import json
from pathlib import Path

from raypipe.errors import ScheduleError
from raypipe.files import parse_json, read_regular
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import from_json
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule


def load(path: Path) -> tuple[Schedule, CostTable | None]:
    """Read a schedule from the file ``path``, and its costs if it is JSON (the text form has none).

    Raises:
        ScheduleError: the file cannot be read, or is not a schedule.
    """
    source = str(path)
    try:
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise ScheduleError(source, error.strerror or str(error), "name a readable schedule file") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(source, f"not text at byte {error.start}", "give JSON or the text form") from error
    if not text.lstrip().startswith(("{", "[")):
        return from_text(text, source), None
    try:
        data = parse_json(text)
    except ValueError as error:
        place = f"{source}:{error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else source
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ScheduleError(place, f"not JSON: {why}", "correct the file at that place") from error
    schedule, costs = from_json(data, source)
    return schedule, costs
