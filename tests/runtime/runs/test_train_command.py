"""The whole way as a user goes it: the command, Ray Train, stage actors; then resuming, and a killed actor.

The command runs as a process once; after that in this one, with its driver.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.job_files import write_job
from tests.processes import beyond_loopback, listening, session_of
from tests.ray_environment import may_mount, without_ray

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]
POOR = {name: "http://127.0.0.1:9" for kind in ("http", "https") for name in (f"{kind}_proxy", f"{kind.upper()}_PROXY")}
POOR |= {"LC_ALL": "C", "LANG": "C", "HOME": "/proc/self"}
"""Proxies that answer nobody, a locale of ASCII alone, and a home directory in which not even root can write."""


def small_job(path: Path, text: Path, steps: int) -> Path:
    return write_job(path, text, steps=steps, clip=1.0, eval_every=10, eval_batches=2, checkpoint_every=10)


def train(capsys: pytest.CaptureFixture[str], job: Path, directory: Path, *extra: str) -> dict:
    from raypipe.cli import run

    assert run(["train", str(job), "--run-dir", str(directory), "--json", *extra]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def job(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_job(tmp_path_factory.mktemp("job") / "small.yaml", text_folder, 40)


@pytest.fixture(scope="module")
def undisturbed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """A run on a poor machine, also with little shared memory; beside it, where any of its processes listened."""
    directory = tmp_path_factory.mktemp("runs") / "mit Umläuten" / "läuft 1"
    named = shutil.copy(job, directory.parents[1] / "größe – 1.yaml")
    words = [sys.executable, "-m", "raypipe", "train", named, "--run-dir", str(directory), "--json"]
    if may_mount():
        small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"'
        words = ["unshare", "-m", "--propagation", "private", "bash", "-ec", small, "bash", *words]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=without_ray(RAY_ADDRESS="local", **POOR),
    ) as process:  # fmt: skip
        heard: dict[str, str] = {}
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            heard |= listening(session_of(process.pid))
            time.sleep(0.5)
        out, err = process.communicate(timeout=5)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    lines = out.strip().splitlines()
    assert len(lines) == 1, out  # nothing but the object
    return json.loads(lines[0]) | {"heard": heard}, directory


def test_a_local_run_listens_on_loopback_only(undisturbed) -> None:
    heard = undisturbed[0]["heard"]
    assert {"gcs_server", "raylet"} <= set(heard.values())  # the look at the tables was no empty one
    assert beyond_loopback(heard) == {}


def test_sigterm_ends_a_run_that_goes_on_to_the_same_losses(
    undisturbed, driver_here, job, tmp_path, capsys
) -> None:  # fmt: skip
    directory = tmp_path / "run"
    words = [sys.executable, "-m", "tests.forked_workers.command", "train", str(job), "--run-dir", str(directory)]
    slow = ["--set", "train.eval_every=1", "--set", "train.checkpoint_every=4"]
    with subprocess.Popen(
        [*words, *slow], stderr=subprocess.PIPE, text=True, env=without_ray(RAY_ADDRESS="local"), start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and not read_rows(directory / METRICS):
            time.sleep(0.02)
        others = session_of(process.pid) - {process.pid}
        process.terminate()
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 143, err
    (ended,) = [row for row in read_rows(directory / EVENTS) if row["event"] == "interrupted"]
    assert err.count("SIGTERM") == err.count(f"ended by SIGTERM after step {ended['step']}, with a checkpoint") == 1
    assert "Traceback" not in err
    assert "stack" not in err
    assert 0 < ended["step"] < 40
    assert (directory / "checkpoints" / f"step-{ended['step']:08d}" / "manifest.json").exists()
    deadline = time.monotonic() + 20
    while (left := {pid for pid in others if Path(f"/proc/{pid}").exists()}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    again = train(capsys, job, directory, "--resume")
    assert again["resumed_from"] == ended["step"]
    losses = [row["loss"] for row in read_rows(directory / METRICS) if "loss" in row]
    assert losses == pytest.approx(undisturbed[0]["losses"], rel=1e-6)


def test_run_directory_and_result(undisturbed) -> None:
    result, directory = undisturbed
    assert result["steps"] == 40 == len(result["losses"])
    assert result["losses"][-1] < result["losses"][0]
    assert result["plan"] == {"schedule": "1f1b", "stages": 2, "replicas": 1, "microbatch": 2}
    # The tied embedding; four micro-batches of two, there and back, 16 places of 32 float32 values.
    assert result["counts"] == {
        "all_gather": 0, "reduce_scatter": 0, "all_reduce": 1, "p2p": 8, "p2p_bytes": 8 * 2 * 16 * 32 * 4,
    }  # fmt: skip
    assert result["recoveries"] == 0
    assert result["resumed_from"] is None
    notices = [e["message"] for e in _events(directory) if e["event"] == "notice"]
    assert not [text for text in notices if "failed" in text], "metrics are exported under such a name too"
    assert result["predicted_step_s"] > 0
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "val_loss" not in r]
    wanted = {"step", "loss", "grad_norm", "lr", "step_s", "tokens_per_s", "bubble_ratio"}
    assert all(set(r) == wanted for r in steps)
    assert [r["step"] for r in rows if "val_loss" in r] == [10, 20, 30, 40]
    for name in ("plan.json", "timeline.json", "trace.json"):
        json.loads((directory / name).read_text())
    kept = sorted(p.name for p in (directory / "checkpoints").iterdir())
    assert kept == ["step-00000030", "step-00000040"]


def test_resumed_run_is_bit_identical(undisturbed, driver_here, job: Path, tmp_path: Path, capsys) -> None:
    """As after a crash: the log has more steps than the newest checkpoint that is whole, and a notice names both."""
    from raypipe.cli import run

    result, done = undisturbed
    directory = tmp_path / "stopped"
    shutil.copytree(done, directory)
    (directory / "checkpoints" / "step-00000040" / "manifest.json").write_text("{")
    assert run(["train", str(job), "--run-dir", str(directory), "--json", "--resume"]) == 0
    said = capsys.readouterr()
    rest = json.loads(said.out)
    (notice,) = [e["message"] for e in _events(directory) if "step-00000040" in e.get("message", "")]
    assert notice.endswith("using step-00000030")
    assert said.err.replace("\n", "").count("using step-00000030") == 1, said.err
    assert rest["resumed_from"] == 30
    assert rest["losses"] == result["losses"]  # to the last bit
    assert rest["val_loss"] == result["val_loss"]


def test_killed_stage_actor_changes_no_loss(undisturbed, driver_here, job: Path, tmp_path: Path, capsys) -> None:
    result, _ = undisturbed
    directory = tmp_path / "killed"
    killer = threading.Thread(target=_kill_after_a_checkpoint, args=(directory,))
    killer.start()
    after = train(capsys, job, directory, "--set", "train.standby=1")
    killer.join()
    assert after["recoveries"] == 1
    assert after["losses"] == result["losses"]
    assert after["val_loss"] == result["val_loss"]
    first, second = (e["devices"] for e in _events(directory) if e["event"] == "started")
    assert first[0]["pid"] == second[0]["pid"], "the other stage keeps its process"
    assert [(one["kind"], one["replaced"]) for one in after["recovery"]] == [("checkpoint", [1])]
    assert (directory / ".attempted").read_text() == "attempted\n", "and the driver its own"


def _events(directory: Path) -> list[dict]:
    path = directory / "events.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines() if x] if path.exists() else []


def _kill_after_a_checkpoint(directory: Path) -> None:
    """Kill stage 1's actor once the first checkpoint is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        rows = _events(directory)
        if any(r["event"] == "checkpoint" for r in rows):
            os.kill(int(next(r for r in rows if r["event"] == "started")["devices"][1]["pid"]), signal.SIGKILL)
            return
        time.sleep(0.02)


def test_the_sampled_model_is_the_trained_one(undisturbed, capsys) -> None:
    import torch

    from raypipe.cli import run
    from raypipe.data import Corpus
    from raypipe.sample import sample_text
    from raypipe.trained import load_body

    result, directory = undisturbed
    job, network = load_body(directory)
    corpus = Corpus.open(directory / "data")
    with torch.no_grad():
        losses = []
        for batch in range(2):  # eval_batches
            tokens, targets = corpus.batch("val", 0, batch, 8)
            losses.append(
                torch.nn.functional.cross_entropy(
                    network((), {"input_ids": tokens})[0].flatten(0, 1), targets.flatten()
                ).item()
            )
    assert sum(losses) / 2 == pytest.approx(result["val_loss"], rel=1e-5)
    assert job.model.layers == 2

    text = sample_text(directory, "def ", 30, 0.8, seed=1)
    assert text.startswith("def ")
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert text == sample_text(directory, "def ", 30, 0.8, seed=1)
    assert text != sample_text(directory, "def ", 30, 0.8, seed=2)
    greedy = sample_text(directory, "def ", 30, 0, seed=1)
    assert greedy == sample_text(directory, "def ", 30, 0, seed=2)
    assert run(["sample", str(directory), "--length", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_sampling_from_nothing_is_one_message(tmp_path, capsys) -> None:
    from raypipe.cli import run

    assert run(["sample", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
