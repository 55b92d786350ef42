"""Runs of the command where a machine is short of something, in a mount namespace where that is allowed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.ray_environment import without_ray
from tests.runtime.runs.test_train_command import JOB

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]
CLOSED = "http://127.0.0.1:9"
"""A proxy that answers nobody."""


def may_mount() -> bool:
    words = ["unshare", "-m", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


def run(mounts: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run raypipe after shell commands that mount something; these only where that is allowed."""
    command = shlex.join([sys.executable, "-m", "raypipe", *words])
    apart = ["unshare", "-m", "--propagation", "private"] if mounts else []
    return subprocess.run(
        [*apart, "bash", "-ec", f"{mounts}\nexec {command}"], capture_output=True, text=True, timeout=240, check=False,
        env=without_ray(RAY_ADDRESS="local", **environment),
    )  # fmt: skip


@pytest.fixture
def job(text_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "größe – 1.yaml"
    path.write_text(JOB.format(path=text_folder, steps=40), encoding="utf-8")
    return path


@pytest.mark.parametrize("everything", [False, True])
def test_little_shared_memory_proxies_and_a_name_with_umlauts(job: Path, tmp_path: Path, everything: bool) -> None:
    """And with ``everything``, a locale of ASCII alone and a home directory in which not even root can write."""
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm" if may_mount() else ""
    directory = tmp_path / "mit Umläuten" / "läuft 1"
    poor = {name: CLOSED for proxy in ("http_proxy", "https_proxy") for name in (proxy, proxy.upper())}
    if everything:
        poor |= {"LC_ALL": "C", "LANG": "C", "HOME": "/proc/self"}
    done = run(small, "train", str(job), "--run-dir", str(directory), **poor)
    assert done.returncode == 0, done.stderr
    assert sum("loss" in row for row in read_rows(directory / METRICS)) == 40
    notices = [e["message"] for e in read_rows(directory / EVENTS) if e["event"] == "notice"]
    assert not [text for text in notices if "failed" in text], "metrics are exported under such a name too"
    assert "Traceback" not in done.stderr


def test_a_disk_that_fills_is_one_error_and_the_run_goes_on_from_the_checkpoint_before(
    job: Path, tmp_path: Path
) -> None:
    if not may_mount():
        pytest.skip("no file system can be mounted here")
    disk = tmp_path / "disk"
    disk.mkdir()
    kept = tmp_path / "kept"
    words = ["train", str(job), "--run-dir", str(disk / "run")]
    words += ["--set", "train.checkpoint_every=1", "--set", "train.keep_checkpoints=100"]
    # What the small disk holds is copied away when the command has ended: it goes with the namespace.
    full = f"mount -t tmpfs -o size=4m tmpfs {disk}\ntrap 'cp -r {disk}/run {kept}' EXIT\nexec() {{ \"$@\"; }}"
    done = run(full, *words)
    assert done.returncode == 1, done.stdout
    assert done.stderr.count("No space left on device") == 1, done.stderr
    assert str(disk / "run") in done.stderr
    assert "Traceback" not in done.stderr
    before = len(read_rows(kept / METRICS))
    assert 0 < before < 40
    (disk / "run").parent.rmdir()
    kept.rename(disk)
    again = run("", "train", str(job), "--run-dir", str(disk), "--resume")
    assert again.returncode == 0, again.stderr
    assert max(row["step"] for row in read_rows(disk / METRICS)) == 40
