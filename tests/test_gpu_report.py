"""The report of ``make gpu``: a section that does not end is one that failed, and leaves what it has said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.gpu.__main__ import run_apart


@pytest.mark.slow
def test_a_section_that_does_not_end_is_ended_and_reported(tmp_path: Path) -> None:
    result = run_apart("losses", "cpu", tmp_path, limit_s=0.3)
    assert (result["ok"], result["error"]) == (False, "took more than 0.3 s")
    assert json.loads((tmp_path / "losses.json").read_text()) == result
    assert (tmp_path / "losses.log").is_file()
