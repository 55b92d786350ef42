"""What a device that measures leaves on disk, and how it times messages."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
    monkeypatch.setattr(
        f"{module}.replace", lambda old, **new: SimpleNamespace(**{"data": old.data, "job": job, **new})
    )
    stage.hold(setup)
    stage.hold(setup)
    assert held == [*(tmp_path / "temporary").iterdir()] * 2
    stage.clear()
    assert list((tmp_path / "temporary").iterdir()) == []


class Copies:
    """A sender over a GPU's copies: what it sends leaves at the third look, and its ``flush`` sleeps between two."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.left = 0

    @property
    def pending(self) -> bool:
        return self.left > 0

    def progress(self) -> None:
        self.left -= 1

    def send(self, label: object, tensors: object) -> None:
        self.said.append("send")
        self.left = 3

    def flush(self, timeout_s: float) -> None:
        self.said.append("flush that sleeps" if self.left else "flush")


def test_a_message_of_a_gpu_is_timed_without_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = StageProfiler.__new__(StageProfiler)
    sender = Copies()
    received = SimpleNamespace(post=lambda expected: None, recv=lambda label, s: sender.said.append("received"))
    worker.device = torch.device("cuda", 0)
    worker.communicators = SimpleNamespace(senders={1: sender}, receivers={1: received})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: torch.zeros(1))
    worker.message_seconds(1, True, [4], 1)
    assert sender.said == ["send", "received", "flush"]
    sender.said.clear()
    worker.message_seconds(1, False, [4], 1)
    assert sender.said == ["received", "send", "flush"]
