"""The scripts are run by test_scripts.py, in a folder of their own."""

from __future__ import annotations

import pytest

collect_ignore = ["scripts"]


@pytest.fixture
def driver(driver_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PipelineTrainer.train`` in this process starts stage actors, but no Ray Train, of which its result is made."""
    monkeypatch.setattr("raypipe.trainer.callbacks.result_of", lambda *_: None)
