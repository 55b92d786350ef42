"""The Slurm script: a run on two hosts, ended by the signal before the time limit, queued again, and resumed.

``srun`` and ``scontrol`` are stand-ins on the first host. The hosts share files, so ``srun`` leaves its command in one
and this process runs it on the second host, as the other node's daemon would.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.hosts import Host, environment, hosts
from tests.job_files import PIPELINE, write_job
from tests.ray_environment import forking
from tests.runtime.runs.plain_training import plain_losses

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]
SCRIPT = Path(__file__).parents[2] / "cluster" / "slurm" / "train.sbatch"
STEPS = 400
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
"""What Ray has started on a node ends when it is asked to, and not half a minute later."""
SRUN = """#!/bin/bash
printf '%q ' "$@" > {folder}/command.new
mv {folder}/command.new {folder}/command
trap 'touch {folder}/srun-ended; exit 0' TERM
while true; do sleep 0.1; done
"""
SCONTROL = """#!/bin/bash
echo "$@" >> {folder}/asked
"""


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def allocation(members: list[Host], folder: Path, job: Path, run: Path, terminate: bool) -> tuple[int, str]:
    """Run the script on the first of two hosts, its ``srun`` on the second; return its status and what it printed."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.format(folder=folder), encoding="utf-8")
        (folder / name).chmod(0o755)
    settings = {**AT_ONCE, **forking()}
    path = f"{folder}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    slurm = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "1", "SLURMD_NODENAME": "node1",
    }  # fmt: skip
    script = subprocess.Popen(
        members[0].command("bash", str(SCRIPT), str(job), str(run), "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(PATH=path, **slurm, **settings),
    )  # fmt: skip
    wait_for((folder / "command").exists, script)
    options, command = [], shlex.split((folder / "command").read_text(encoding="utf-8"))
    while command[0].startswith("--"):
        options.append(command.pop(0))
    assert set(options) == {"--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--exclude=node1"}
    with subprocess.Popen(
        members[1].command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(PATH=path, **settings),
    ) as node:  # fmt: skip
        if terminate:
            wait_for(lambda: (run / METRICS).exists() and len(read_rows(run / METRICS)) > 3, script)
            ran = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()[0]
            subprocess.run(["kill", "-TERM", ran], check=True)
        said, _ = script.communicate(timeout=300)
        assert (folder / "srun-ended").exists()  # nothing waits on the other nodes when the script has ended
        node.kill()
    return script.returncode, said


def test_a_run_saves_before_the_time_limit_is_queued_again_and_goes_on(tmp_path, text_folder) -> None:
    """The losses over both allocations are those of one process."""
    run = tmp_path / "run"
    job = write_job(
        tmp_path / "job.yaml", text_folder, PIPELINE, steps=STEPS, lr=0.0003, dtype="float64", eval_batches=1
    )
    for number, (status, requeued) in enumerate(((143, "requeue 4711\n"), (0, ""))):
        folder = tmp_path / f"allocation-{number}"
        folder.mkdir()
        with hosts(2) as both:
            ended, said = allocation(both, folder, job, run, terminate=number == 0)
        assert ended == status, said
        asked = folder / "asked"
        assert (asked.read_text(encoding="utf-8") if asked.exists() else "") == requeued
        started = [row for row in read_rows(run / EVENTS) if row["event"] == "started"]
        assert len({device["node"] for device in started[-1]["devices"]}) == 2
    resumed = started[-1]["resumed_from"]
    assert 3 <= resumed < STEPS
    losses = [row["loss"] for row in read_rows(run / METRICS) if "loss" in row]
    assert losses == pytest.approx(plain_losses(load_job(job), run / "data", STEPS), abs=1e-9)
