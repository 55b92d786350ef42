"""The live table shows a run's newest rows, and the command prints it once or follows the run to its end."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from raypipe.cli import run as command
from raypipe.observe.progress import CURVE, curve, live_table
from raypipe.observe.report import report_page
from raypipe.observe.run_log import RunLog
from raypipe.observe.run_record import read_run


def step(number: int, loss: float | None = None) -> dict[str, object]:
    return {
        "step": number, "loss": 100.0 - number if loss is None else loss, "grad_norm": 1.0, "lr": 0.001,
        "step_s": 0.25, "tokens_per_s": 16384.0, "bubble_ratio": 0.125,
    }  # fmt: skip


@pytest.fixture
def log(tmp_path: Path):
    log = RunLog(tmp_path)
    (tmp_path / "job.json").write_text(json.dumps({"name": "a[red]b", "train": {"steps": 90}}))
    (tmp_path / "plan.json").write_text(json.dumps({"parallel": {"schedule": "zb-h1", "stages": 2, "replicas": 1}}))
    log.event("run", resume=False, devices=2, cores=2)
    return log


def shown(directory: Path, now: float | None = None) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(live_table(read_run(directory), now))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_before_the_first_step(log: RunLog, tmp_path: Path) -> None:
    assert shown(tmp_path) == "a[red]b: zb-h1, 2 x 1; starting, step 0/90\n"


def test_the_newest_steps_and_events(log: RunLog, tmp_path: Path) -> None:
    device = {"name": "stage 0 · replica 0", "node": "n", "device": "cpu", "pid": 1, "parameters": 34624}
    log.event("started", devices=[device], resumed_from=None)
    log.event("predicted", step=2, step_s=0.2, bubble_ratio=0.1)
    for number in range(1, 81):
        log.metric(step(number))
    log.metric({"step": 80, "val_loss": 21.5})
    text = shown(tmp_path, now=time.time() + 30)
    assert "running, step 80/90, validation loss 21.5000 (step 80), last news 30 s ago" in text.replace("\n", " ")
    numbers = [line.split()[0] for line in text.splitlines() if line.strip()[:2].isdigit()]
    assert numbers == [str(n) for n in range(71, 81)]
    assert "20.0000" in text
    assert "predicted" in text
    assert "34,624" in text
    log.event("finished", counts={}, memory_bytes=[3 * 2**30])
    text = shown(tmp_path)
    assert "finished, step 80/90" in text
    assert "3.0 GiB" in text


def test_slow_devices_are_marked_until_they_recover(log: RunLog, tmp_path: Path) -> None:
    devices = [{"name": f"stage {k}", "node": "n", "device": "cpu", "pid": k, "parameters": 7} for k in range(2)]
    log.event("started", devices=devices, resumed_from=None)
    log.event("straggler", step=31, device=1, slowdown=1.96, message="device 1 (stage 1) is slow")
    text = shown(tmp_path)
    assert ["slow: 2.0 x" in line for line in text.splitlines() if line.startswith("stage ")][:2] == [False, True]
    assert "step    31  device 1 (stage 1) is slow" in text
    log.event("straggler", step=60, device=1, slowdown=1.0, message="as fast as before")
    assert "slow: " not in shown(tmp_path)


def test_a_served_run_shows_each_model(log: RunLog, tmp_path: Path) -> None:
    log.event("serving", base="tiny", url="http://127.0.0.1:8300")
    for number in range(1, 7):
        of = {"model": f"{number % 2}23456789:train:0", "calls": 3, "queue": 2, "between_calls": 0.25}
        log.metric({**step(number), **of})
    text = shown(tmp_path)
    assert "starting, step 6\n" in text  # there is no planned end
    assert "serving tiny at http://127.0.0.1:8300" in text
    assert [line.split()[2] for line in text.splitlines() if line.startswith("loss of")] == ["123456:0", "023456:0"]
    row = next(line for line in text.splitlines() if line.startswith("   6"))
    assert row.split()[-4:] == ["023456:0", "3", "2", "25.0%"]
    assert ">023456:0<" in report_page(read_run(tmp_path))


def test_the_curve_falls_as_losses_do(log: RunLog, tmp_path: Path) -> None:
    for number in range(1, 81):
        log.metric({**step(number), **({"loss": None} if number == 7 else {})})
    drawn = curve(read_run(tmp_path).steps)
    assert len(drawn) == CURVE
    levels = [" .:-=+*#".index(c) for c in drawn]
    assert levels == sorted(levels, reverse=True)
    assert (levels[0], levels[-1]) == (7, 1)


def test_once(log: RunLog, tmp_path: Path, capsys) -> None:
    log.metric(step(1))
    assert command(["watch", str(tmp_path), "--once"]) == 0
    assert "99.0000" in capsys.readouterr().out
    assert command(["watch", str(tmp_path / "nothing"), "--once"]) == 2


def test_a_terminal_follows_the_run_to_its_end(log: RunLog, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes standard output for a terminal
    log.event("started", devices=[], resumed_from=None)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(command(["watch", str(tmp_path), "--every", "0.1"])))
    thread.start()
    log.metric(step(1))
    log.event("finished", counts={}, memory_bytes=[])
    thread.join(30)
    assert seen == [0]
    assert "finished, step 1/90" in capsys.readouterr().out
