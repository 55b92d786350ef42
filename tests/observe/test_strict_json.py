"""No NaN and no Infinity in what raypipe writes: other readers of JSON refuse the whole line."""

from __future__ import annotations

import json
from pathlib import Path

from raypipe.files import strict_json
from raypipe.observe.run_log import EVENTS, METRICS, RunLog

BAD = {"loss": float("nan"), "deep": [1.5, {"more": (float("inf"), -float("inf"), 2)}], "text": "NaN"}
GOOD = {"loss": None, "deep": [1.5, {"more": [None, None, 2]}], "text": "NaN"}


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_numbers_that_are_not_finite_are_null() -> None:
    assert json.loads(strict_json(BAD), parse_constant=refuse) == GOOD
    assert strict_json({"a": [1, 2.5]}, indent=1) == json.dumps({"a": [1, 2.5]}, indent=1)


def test_the_logs_of_a_run_are_strict(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.metric(BAD)
    log.event("realised", **BAD)
    assert json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse) == GOOD
    assert json.loads((tmp_path / EVENTS).read_text(), parse_constant=refuse).items() >= GOOD.items()
