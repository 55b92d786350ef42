"""What pip installs: a small wheel with all that commands look for, and commands that start fast."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_BYTES = 2_000_000
START_S = 0.4
"""Most processor time of a command that neither trains nor searches."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("needs a git checkout")
    for name in filter(None, names.stdout.split("\0")):
        if name.startswith(("raypipe/", "jobs/", "cluster/", "dashboards/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "-w", str(folder), str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_is_small_and_has_what_commands_look_for(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("raypipe/py.typed", "share/raypipe/jobs/quickstart.yaml", "share/raypipe/cluster/devices/h100.yaml"):
        assert any(name.endswith(wanted) for name in names), wanted
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["schedule", "1f1b", "--devices", "4", "--microbatches", "8"]], ids=str)
def test_a_quick_command_starts_fast_without_torch_and_ray(words: list[str]) -> None:
    """Processor time, the least of three: other load makes the wall's time longer, and a cold cache a first one."""
    code = f"""
import sys
from raypipe.cli import run
assert run({words!r}) == 0
print(*sorted({{'torch', 'ray'}} & set(sys.modules)), file=sys.stderr)
"""
    used = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        after = os.times()
        used.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert (done.returncode, done.stderr.strip()) == (0, "")
    assert min(used) < START_S
