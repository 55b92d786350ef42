"""``ray up cluster/ray-up/local.yaml`` as it is, from one host to a head and a worker over ssh, and down again.

Only what is in <...> is filled in. There is no network to install from: pip finds this environment's packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.exhaustive import ONLY
from tests.hosts import READY_S, Host, hosts

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.runs, pytest.mark.own_ray, ONLY]
RAY = '#!/bin/sh\nexec {}/raypipe-venv/bin/python -m ray.scripts.scripts "$@"\n'
# pip reads this key the other way round: "false" is the flag --no-build-isolation.
PIP = "[global]\nno-index = true\nno-build-isolation = false\n"
SSHD = "HostKey {}/.ssh/id_ed25519\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"


def at_home(host: Host, folder: Path, key: Path) -> Path:
    """Give a host's root a home of its own, an environment with this one's packages, and ssh that ``key`` opens."""
    home = folder / host.address
    (home / ".ssh").mkdir(parents=True)
    for name in (key.name, f"{key.name}.pub"):
        shutil.copy(key.with_name(name), home / ".ssh")
    shutil.copy(key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
    (home / ".bashrc").touch()
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    (home / ".ray" / "auth_token").chmod(0o600)
    venv = home / "raypipe-venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "uninstall", "--quiet", "--yes", "setuptools"], check=True)  # an old one
    (venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "theirs.pth").write_text(
        sysconfig.get_path("purelib")
    )
    (venv / "bin" / "ray").write_text(RAY.format(home))
    (venv / "bin" / "ray").chmod(0o755)
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text(PIP)
    (home / "sshd.conf").write_text(SSHD.format(home))
    host.must(
        "sh", "-c", f"sed 's#:/root:#:{home}:#' /etc/passwd > {home}/passwd && mount --bind {home}/passwd /etc/passwd"
    )
    host.must("sh", "-c", f"mkdir -p /run/sshd && $(command -v sshd) -f {home}/sshd.conf -E {home}/sshd.log")
    return home


@pytest.mark.skipif(not all(map(shutil.which, ("sshd", "ssh", "rsync"))), reason="needs sshd, ssh and rsync")
def test_ray_up_starts_a_head_and_a_worker_that_train(tmp_path: Path) -> None:
    key = tmp_path / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("raypipe", "jobs", "cluster", "dashboards", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    with hosts(3) as (head, worker, laptop):
        homes = [at_home(host, tmp_path, key) for host in (head, worker, laptop)]
        text = (ROOT / "cluster" / "ray-up" / "local.yaml").read_text(encoding="utf-8")
        for placeholder, value in {
            "<head>": head.address, "<worker-1>, <worker-2>": worker.address, "<user>": "root",
        }.items():  # fmt: skip
            assert placeholder in text
            text = text.replace(placeholder, value)
        (clone / "local.yaml").write_text(text)

        def ray(*words: str) -> str:
            program = str(homes[2] / "raypipe-venv" / "bin" / "ray")
            given = f'cd {clone} && exec {program} "$@"'
            done = laptop.run("sh", "-c", given, "ray", *words, HOME=str(homes[2]), RAY_AUTH_MODE="token")
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            return done.stdout

        ray("up", "--yes", "--no-config-cache", "local.yaml")
        until = time.monotonic() + READY_S
        while worker.address not in ray("exec", "--no-config-cache", "local.yaml", "ray status -v"):
            assert time.monotonic() < until, "the worker did not come"
            time.sleep(2.0)
        four = "--set parallel.schedule=1f1b --set parallel.stages=4 --set parallel.microbatch=4"
        train = f"raypipe train raypipe/jobs/quickstart.yaml {four} --set train.steps=2 --set train.eval_batches=1"
        assert "2 steps" in ray("exec", "--no-config-cache", "local.yaml", train)
        ray("down", "--yes", "local.yaml")
