"""What each library wrote is read back with that library."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.launch import followers as loggers
from raypipe.launch.followers import Reports, check_loggers, mlflow_name
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from tests.job_files import TINY_GPT, minimal_job

ROWS: list[dict[str, Any]] = [
    {
        "step": step, "loss": 4.0 / step, "grad_norm": 0.5, "lr": 0.001, "step_s": 0.25, "tokens_per_s": 4096.0,
        "bubble_ratio": 0.25, "data_wait_share": 0.01, "memory_bytes": float(3 << 30), "mfu": 0.5,
    }
    for step in (1, 2, 3)
]  # fmt: skip
TOLD = {
    "loss": 2.0, "grad_norm": 0.5, "lr": 0.001, "tps": 4096.0, "time/step(s)": 0.25, "mfu(%)": 50.0, "bubble(%)": 25.0,
    "data_wait(%)": 1.0, "memory/max_reserved(GiB)": 3.0,
}  # fmt: skip
"""Of step 2."""


def job_of(*report_to: str) -> JobSpec:
    return minimal_job(TINY_GPT, parallel={"stages": 1, "microbatch": 2}, steps=3, report_to=list(report_to))


def told(directory: Path, *report_to: str, rows: list[dict[str, Any]] = ROWS) -> None:
    """A run that logs some rows and ends."""
    reports, log = Reports(job_of(*report_to), directory), RunLog(directory)
    for row in rows:
        log.metric(row)
        reports.update()
    log.metric({"step": rows[-1]["step"], "val_loss": 1.5})
    reports.close()


@pytest.mark.slow
def test_tensorboard_reads_every_figure_and_a_resume_replaces_steps(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told(tmp_path, "tensorboard")
    again = [row | {"loss": 1.0} for row in ROWS[1:]]  # the run was resumed after step 1
    told(tmp_path, "tensorboard", rows=again)
    result = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(result.Tags()["scalars"]) == {*TOLD, "val_loss"}
    for name, value in TOLD.items():
        by_step = {Scalar.step: Scalar.value for Scalar in result.Scalars(name)}
        assert by_step.keys() == {1, 2, 3}
        assert by_step[2] == pytest.approx(1.0 if name == "loss" else value, rel=1e-6)
    assert [Scalar.value for Scalar in result.Scalars("loss")] == [4.0, 1.0, 1.0]


@pytest.mark.slow
def test_mlflow_reads_every_figure_and_a_resume_goes_on_with_the_run(tmp_path: Path, monkeypatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    told(tmp_path, "mlflow")
    told(tmp_path, "mlflow", rows=[ROWS[0] | {"step": 4}])
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.batch"] == "4"
    for name, value in TOLD.items():
        by_step = {one.step: one.value for one in client.get_metric_history(run.info.run_id, mlflow_name(name))}
        assert by_step.keys() == {1, 2, 3, 4}
        assert by_step[2] == pytest.approx(value)


@pytest.mark.slow
def test_wandb_writes_every_figure_offline(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_MODE", raising=False)
    # In a process of its own, because wandb replaces sys.exit for good.
    code = "import sys; from pathlib import Path; from tests.launch.test_loggers import told; "
    command = [sys.executable, "-c", code + "told(Path(sys.argv[1]), 'wandb')", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    steps = {}
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
            steps[row["_step"]] = row
    assert {name: steps[2][name] for name in TOLD} == pytest.approx(TOLD)
    assert steps[3]["val_loss"] == 1.5


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format, in which wandb writes: blocks of 32 KiB, pieces with 7 bytes ahead."""
    assert content[:4] == b":W&B"
    place, held = 7, b""
    while place + 7 <= len(content):
        if (left := -place % 32768) and left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        held += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield held
            held = b""


def test_a_logger_that_fails_is_left_out_and_training_is_not_told(tmp_path: Path, monkeypatch) -> None:
    class Broken:
        heard: ClassVar[list[int]] = []

        def __init__(self, *_: object) -> None:
            pass

        def log(self, step: int, values: object) -> None:
            self.heard.append(step)
            raise OSError("no space left")

    monkeypatch.setitem(loggers.LOGGERS, "wandb", loggers.LoggerKind(Broken, "json"))
    told(tmp_path, "wandb")
    assert Broken.heard == [1]
    (notice,) = read_rows(tmp_path / EVENTS)
    assert notice["message"] == "wandb gets no more figures of this run: OSError: no space left"
    assert len(read_rows(tmp_path / METRICS)) == 4


def test_a_missing_package_is_one_error_before_the_run(monkeypatch) -> None:
    monkeypatch.setitem(loggers.LOGGERS, "mlflow", loggers.LoggerKind(loggers.MLflow, "no_such_package"))
    with pytest.raises(SpecError, match=r"needs no_such_package, which is not installed\n  fix: .*\[mlflow\]"):
        check_loggers(job_of("mlflow"))
    with pytest.raises(SpecError, match="tensorboard"):
        job_of("tensorbord")
