"""The process that compiles a stage: what it answers, that it fails, or that it takes too long."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypipe.runtime.compiled.stored.stored_stages import HelperProcess


def started(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> HelperProcess:
    """A process that runs a shell script instead of the compiler."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))
    return HelperProcess(cast(Any, SimpleNamespace(packed=lambda: b"a request")))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("""echo '{"reason": null}'""", None),
        ("""echo '{"reason": "InductorError: no kernel"}'""", "InductorError: no kernel"),
        ("echo killed by the system >&2; exit 3", "ended with status 3: killed by the system"),
        ("exit 0", "ended with status 0: no message"),
    ],
    ids=["compiled", "refused", "failed", "silent"],
)
def test_what_a_process_answers(
    script: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(script, tmp_path, monkeypatch).reason(time.monotonic() + 30)
    assert found is None if reason is None else reason in str(found)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = started("sleep 60", tmp_path, monkeypatch)
    assert "train.compile_timeout_s" in str(process.reason(time.monotonic() + 0.2))
    assert process._process.poll() is not None
    process.end()  # it has ended


def test_a_process_is_given_up_with_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = started("sleep 60", tmp_path, monkeypatch)
    process.end()
    assert "status" in str(process.reason(time.monotonic() + 30))
