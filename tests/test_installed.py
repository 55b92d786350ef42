"""What pip installs: a small wheel with all that commands look for, commands that start fast, and a first run with it.

The first run is that of another user in a root of its own, as in a container: with this machine's libraries and this
environment's packages, read-only, a home that can't be written to, one empty folder, no network and no compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.exhaustive import ONLY

ROOT = Path(__file__).parents[1]
TOOLS = ("unshare", "chroot", "setpriv", "mount", "ip")
NOBODY = "65534"
MOST_BYTES = 2_000_000
OF_TORCH = 0.25
"""Most processor time of a command that neither trains nor searches, in that which ``import torch`` takes."""


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


def processor_s(code: str) -> float:
    """Return the processor time of a program, the least of three runs: in the first one caches are cold."""
    used = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        after = os.times()
        used.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert (done.returncode, done.stderr.strip()) == (0, "")
    return min(used)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["schedule", "1f1b", "--devices", "4", "--microbatches", "8"]], ids=str)
def test_a_quick_command_starts_fast_without_torch_and_ray(words: list[str]) -> None:
    code = f"""
import sys
from raypipe.cli import run
assert run({words!r}) == 0
print(*sorted({{'torch', 'ray'}} & set(sys.modules)), file=sys.stderr)
"""
    assert processor_s(code) < OF_TORCH * processor_s("import torch")


INSIDE = """
set -e
ip link set lo up
mount --make-rprivate /
cd "$1"
for folder in usr bin lib lib64 etc proc dev sys; do
  test -e /$folder || continue
  mkdir -p ./$folder && mount --rbind /$folder ./$folder
done
for folder in $PACKAGES; do
  mkdir -p ".$folder" && mount --bind "$folder" ".$folder" && mount -o remount,bind,ro ".$folder"
done
mount -t proc proc ./proc
mount -t tmpfs -o size=4g,mode=1777 none ./dev/shm
mkdir -p home tools empty tmp && chmod 1777 tmp  # packages may lie in it
mount --bind home home && mount -o remount,bind,ro home
for tool in sh bash cat ps uname mkdir rm; do ln -sf "$(command -v $tool)" tools/; done
chown $NOBODY:$NOBODY empty
exec chroot . /usr/bin/setpriv --reuid $NOBODY --regid $NOBODY --clear-groups --no-new-privs \\
  /usr/bin/env -i HOME=/home PATH=/empty/venv/bin:/tools LANG=C.UTF-8 /usr/bin/sh -exc "cd /empty; $COMMANDS"
"""
COMMANDS = """{python} -m venv venv
echo {packages} > venv/lib/python{version}/site-packages/theirs.pth
pip install --quiet --no-index --no-deps /{wheel}
raypipe quickstart --set train.steps=4 --run-dir run
raypipe report run -o report.html"""
"""The packages that raypipe needs are this environment's, since there is no network."""


@ONLY
@pytest.mark.runs
@pytest.mark.own_ray
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason="needs Linux, as root"
)
def test_three_commands_from_an_empty_folder_as_another_user(wheel: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for folder in (root, *root.parents[:3]):
        folder.chmod(0o755)
    shutil.copy(wheel, root)
    packages, python = sysconfig.get_path("purelib"), Path(os.path.realpath(sys.executable))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    commands = COMMANDS.format(python=python, packages=packages, version=version, wheel=wheel.name)
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "sh", "-c", INSIDE, "inside", str(root)],
        env={
            "PATH": os.environ["PATH"], "PACKAGES": f"{packages} {python.parents[1]}", "NOBODY": NOBODY,
            "COMMANDS": commands.replace("\n", "; "),
        },
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "4 steps" in done.stdout
    assert "<svg" in (root / "empty" / "report.html").read_text(encoding="utf-8")
    said = done.stderr.partition("+ raypipe quickstart")[2].splitlines()
    trouble = [line for line in said if re.search("ermission|Warning|Traceback", line)]
    assert not trouble, "\n".join(trouble)
