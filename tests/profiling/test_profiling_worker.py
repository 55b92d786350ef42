"""What a device that measures leaves on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

from raypipe.data import is_prepared
from raypipe.profiling.profiling_worker import StageProfiler
from raypipe.runtime.setup.setup import Setup
from tests.runtime.runs.small_runs import small_job


def test_a_folder_is_made_only_for_data_that_is_elsewhere_and_removed(tmp_path, text_folder, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # It changes the process that it is called in: this one, instead of a worker's.
    monkeypatch.setattr("raypipe.runtime.worker.worker.set_up_process", lambda _: None)
    (tmp_path / "temporary").mkdir()
    stage = StageProfiler(0, "profile · device 0")
    stage.clear()
    assert list((tmp_path / "temporary").iterdir()) == []
    held: list[Path] = []

    def build(setup: Setup) -> None:
        assert is_prepared(setup.data)
        held.append(setup.data)
        stage.modules, stage.executor = {}, SimpleNamespace()

    monkeypatch.setattr(stage, "setup", build)
    job = small_job(text_folder, {}, {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8})
    setup = Setup.__new__(Setup)
    for name, value in {"job": job, "fields": None, "data": tmp_path / "another-host"}.items():
        object.__setattr__(setup, name, value)
    module = "raypipe.profiling.profiling_worker"
    monkeypatch.setattr(f"{module}.replace", lambda old, data: SimpleNamespace(data=data, job=job))
    stage.hold(setup)
    stage.hold(setup)
    assert held == [*(tmp_path / "temporary").iterdir()] * 2
    stage.clear()
    assert list((tmp_path / "temporary").iterdir()) == []
