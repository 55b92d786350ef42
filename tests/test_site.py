"""The docs as a site: every link, anchor and reference to the code resolves, and every page is in the navigation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(ROOT / ".mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "schedules/zb-h1.svg" in page
    assert "fonts.googleapis" not in page
    assert "PipelineTrainer" in (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")
