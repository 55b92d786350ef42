"""Both pages in Chromium: axe-core finds nothing, in light and dark, on a wide screen and on a phone.

Needs Chromium and axe-core's ``axe.min.js`` (npm), whose path the environment variable ``AXE`` gives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from raypipe.cli import run as command
from raypipe.observe.report import report_page
from raypipe.observe.run_record import read_run
from tests.observe.recorded import record_run

CHROMIUM, AXE = shutil.which("chromium"), os.environ.get("AXE")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or AXE is None, reason="needs chromium, and AXE=.../axe.min.js of axe-core"),
]
ROOT = Path(__file__).parents[2]
SAY = "axe.run().then(r => { document.body.textContent = 'AXE' + JSON.stringify(r.violations) + 'AXE' })"


def violations(page: str, tmp_path: Path, *options: str) -> list[tuple[str, str]]:
    """Return the impact and the rule of each finding of axe-core on a page, shown by Chromium."""
    assert CHROMIUM is not None
    assert AXE is not None
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)  # which refuses every script
    assert free != page
    file = tmp_path / "page.html"
    file.write_text(free.replace("</body>", f"<script>{Path(AXE).read_text()}</script><script>{SAY}</script></body>"))
    given = [CHROMIUM, "--headless", "--no-sandbox", "--virtual-time-budget=20000", *options, "--dump-dom", str(file)]
    shown = subprocess.run(given, capture_output=True, text=True, timeout=120, check=True).stdout
    told = re.search("<body>AXE(.*)AXE</body>", shown, re.DOTALL)
    assert told, "axe-core said nothing"
    return [(one["impact"], one["id"]) for one in json.loads(unescape(told[1]))]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    run = folder / "run"
    run.mkdir()
    record_run(run, "a <run>")
    file = folder / "plans.html"
    given = ["--cluster", "rtx3090", "--devices", "4", "--budget", "1", "--search", "0", "--html", str(file)]
    assert command(["autoconfigure", str(ROOT / "jobs" / "gpt2.yaml"), *given]) == 0
    return {"report": report_page(read_run(run)), "plans": file.read_text()}


@pytest.mark.parametrize(
    "options",
    [(), ("--blink-settings=preferredColorScheme=0",), ("--window-size=400,800",)],
    ids=["light", "dark", "phone"],
)
@pytest.mark.parametrize("name", ["report", "plans"])
def test_axe_finds_nothing(name: str, options: tuple[str, ...], pages: dict[str, str], tmp_path: Path) -> None:
    assert violations(pages[name], tmp_path, *options) == []


def test_axe_finds_what_is_wrong(pages: dict[str, str], tmp_path: Path) -> None:
    without = pages["report"].replace('<html lang="en">', "<html>")
    assert ("serious", "html-has-lang") in violations(without, tmp_path)
