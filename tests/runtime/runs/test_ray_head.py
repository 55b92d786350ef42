"""A head as users start one: jobs submitted to it, followed and stopped, and what Prometheus finds there meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from raypipe.observe.metrics import DATA_WAIT, EXPERT_LOAD, MEMORY_PLANNED, METRICS, SLOWDOWN
from raypipe.observe.run_log import METRICS as ROWS
from raypipe.observe.run_log import read_rows
from tests.job_files import write_job
from tests.ray_environment import without_ray
from tests.ray_head import Head, ray_head

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]

ROOT = Path(__file__).parents[3]
PEAK_TFLOPS = 0.05
WAIT_S = 120.0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"RAY_metrics_report_interval_ms": "300", "RAYPIPE_PEAK_TFLOPS": str(PEAK_TFLOPS), "PATH": tools}
    with ray_head(2, **settings) as running:
        yield running


def environment(**more: str) -> dict[str, str]:
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return without_ray(PATH=tools, **more)


def test_a_submitted_job_exports_every_metric(head: Head, text_folder: Path, tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", text_folder, steps=150, clip=1.0, eval_every=50, eval_batches=2)
    run = tmp_path / "run"
    words = ["submit", "job.yaml", "--address", head.dashboard, "--run-dir", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "raypipe", *words], cwd=tmp_path, env=environment(**head.token),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    scrapes = []
    while process.poll() is None:
        with suppress(TimeoutError):  # Ray's agent may be slow to answer while processes start; it is asked again
            result = {name: rows for name, rows in head.exported().items() if name.startswith("ray_raypipe")}
            scrapes += [result] if result else []
        time.sleep(0.3)
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.returncode == 0, output
    assert "submitted raysubmit_" in output
    assert "training loss" in output, "the job's summary is passed on"

    ends = ("", "_bucket", "_sum", "_count")
    names = {name for result in scrapes for name in result}
    missing = {m.name for m in METRICS if not any(f"{m.exported}{end}" in names for end in ends)}
    unasked = {MEMORY_PLANNED.name, DATA_WAIT.name, EXPERT_LOAD.name}  # nothing is planned or streamed, and none served
    unasked |= {m.name for m in METRICS if m.name.startswith("raypipe_session_")}
    assert missing - {SLOWDOWN.name} == unasked  # a device may turn slow

    steps = {row["step"]: row for row in read_rows(run / ROWS) if "val_loss" not in row}
    last = next(result for result in reversed(scrapes) if "ray_raypipe_step" in result)  # gauges end with their process
    values = {name: rows[0][1] for name, rows in last.items() if len(rows) == 1}
    labels = last["ray_raypipe_loss"][0][0]
    assert labels["run_name"] == labels["ray_train_run_name"] == "run"
    assert labels["run_id"]
    assert labels["SessionName"].startswith("session_")
    row = steps[int(values["ray_raypipe_step"])]
    keys = {
        "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "step_seconds": "step_s",
        "tokens_per_second": "tokens_per_s", "bubble_ratio": "bubble_ratio",
    }  # fmt: skip
    for name, key in keys.items():
        assert values[f"ray_raypipe_{name}"] == pytest.approx(row[key], rel=1e-6), name
    assert values["ray_raypipe_samples_per_second"] == pytest.approx(8 / row["step_s"])
    # Three times the forward's operations: 2 blocks of 24 s h^2 + 2 s^2 h each, and the output matrix.
    flops = 3 * 8 * (2 * (24 * 16 * 32**2 + 2 * 16**2 * 32) + 2 * 16 * 32 * 256)
    assert values["ray_raypipe_mfu_ratio"] == pytest.approx(flops / row["step_s"] / (2 * PEAK_TFLOPS * 1e12), rel=1e-6)
    assert values["ray_raypipe_recoveries"] == 0
    of_device: dict[str, Counter[str]] = {}
    for name, rows in last.items():
        for tags, value in rows:
            of_device.setdefault(name, Counter())[tags.get("device", "")] += value
    for device in "01":
        computed = of_device["ray_raypipe_task_seconds"][device]
        assert computed + of_device["ray_raypipe_wait_seconds"][device] == pytest.approx(row["step_s"], rel=1e-6)
        held, limit = (of_device[f"ray_raypipe_memory_{what}"][device] for what in ("bytes", "limit_bytes"))
        assert 50e6 < held < limit
    kinds = {(tags["stage"], tags["device"], tags["task"]) for tags, _ in last["ray_raypipe_task_seconds"]}
    assert kinds == {("0", "0", "F"), ("0", "0", "BW"), ("1", "1", "F"), ("1", "1", "BW")}


def test_the_documented_command_submits_the_clone_and_a_stopped_job_works_no_more(head: Head, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cut = ["steps=100000", "batch=8", "eval_batches=1"]
    words = [
        *["ray", "job", "submit", "--address", head.dashboard, "--no-wait", "--working-dir", "."],
        *["--runtime-env", "jobs/runtime_env.yaml"],
        *["--", "raypipe", "train", "jobs/quickstart.yaml", "--run-dir", str(run), "--json"],
        *[word for each in cut for word in ("--set", f"train.{each}")],
        *[word for each in ("schedule=1f1b", "stages=2", "microbatch=2") for word in ("--set", f"parallel.{each}")],
    ]  # fmt: skip
    settings = environment(**head.token, RAY_API_SERVER_ADDRESS=head.dashboard)
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    job = re.search(r"raysubmit_\w+", done.stdout + done.stderr)
    assert job is not None, done.stdout + done.stderr
    deadline = time.monotonic() + WAIT_S
    while not (run / ROWS).exists() or len(read_rows(run / ROWS)) < 3:
        assert time.monotonic() < deadline, (head.folder / "head.log").read_text()
        time.sleep(0.3)
    assert [row["step"] for row in read_rows(run / ROWS)][:3] == [1, 2, 3]
    # It ran the clone that travelled with it, not the one that is installed.
    assert json.loads((run / "job.json").read_text())["name"] == "quickstart"
    done = subprocess.run(["ray", "job", "stop", job[0]], env=settings, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was stopped" in done.stdout + done.stderr
    written = -1
    while (now := (run / ROWS).stat().st_size) != written:
        assert time.monotonic() < deadline, "a stopped job trains on"
        written = now
        time.sleep(2.0)


@pytest.mark.exhaustive
def test_a_job_that_is_not_waited_for_says_its_id(head: Head, text_folder: Path, tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml", text_folder, steps=3)
    run = tmp_path / "run"
    words = [sys.executable, "-m", "raypipe", "submit", "job.yaml", "--no-wait", "--run-dir", str(run)]
    settings = environment(**head.token, RAY_API_SERVER_ADDRESS=head.dashboard)
    taken = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=WAIT_S)
    assert taken.returncode == 0, taken.stderr
    assert re.fullmatch(r"raysubmit_\w+", taken.stdout.strip())
    deadline = time.monotonic() + WAIT_S
    while not (run / ROWS).exists() or len(read_rows(run / ROWS)) < 3:
        assert time.monotonic() < deadline, (head.folder / "head.log").read_text()
        time.sleep(0.3)
