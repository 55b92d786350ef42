"""Submit the quick-start job to a Ray head of its own, the way a user of a cluster does; then take the head down.

    python -m tests.bench.runtime.ray_job [JOB.yaml] [--set key=value ...]

    ray start --head
    ray job submit --working-dir . -- python -m raypipe train jobs/quickstart.yaml

The head gets its own ports on loopback and its own temporary folder, so that it meets no other Ray on this machine;
only its own processes are ended. Prints what the job says and how long each part took; exit status 1 if it failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ray_head import free_ports

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
QUICK = [
    "jobs/quickstart.yaml",
    "--set",
    "train.steps=20",
    "--set",
    "train.eval_every=10",
    "--set",
    "train.warmup_steps=2",
]
START_S = 60.0
STOP_S = 10.0


def environment() -> dict[str, str]:
    """This process's, without any Ray of it, and with this environment's programs first.

    Where Ray finds a token (~/.ray/auth_token, which its first local start writes), `ray start --head` asks for it, but
    `ray job submit` does not send it unless RAY_AUTH_MODE says so.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return own | {
        "PATH": f"{BIN}{os.pathsep}{own.get('PATH', '')}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
    }


@contextmanager
def head(folder: Path) -> Iterator[str]:
    """A Ray head on loopback with two CPUs; yields the address of its dashboard, which takes jobs."""
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    words = [str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--num-cpus", "2"]
    words += ["--temp-dir", str(folder), "--dashboard-host", "127.0.0.1", "--disable-usage-stats"]
    words += [f"--{name}={port}" for name, port in ports.items()]
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment(), start_new_session=True)
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        _wait_until_up(address, process, folder / "head.log")
        yield address
    finally:
        process.send_signal(signal.SIGTERM)  # with --block, it takes its own processes along and nobody else's
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{address}/api/version", timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only to ask for a token
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the head did not come up:\n{log.read_text()}")


def submit(address: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Submit from the repository's root and wait for the job; its output comes back with the client's."""
    command = [str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", ".", "--"]
    return subprocess.run(
        [*command, "python", "-m", "raypipe", "train", *words], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def main(words: list[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="raypipe-job-"))
    begun = time.monotonic()
    try:
        with head(folder) as address:
            up = time.monotonic()
            done = submit(address, [*(words or QUICK), "--run-dir", str(folder / "run")])
            through = time.monotonic()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(done.stdout)
    down = time.monotonic()
    print(f"head up after {up - begun:.1f} s, job through after {through - up:.1f} s, down in {down - through:.1f} s")
    return 0 if done.returncode == 0 and "succeeded" in done.stdout else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
