"""How many cores the devices of one host share."""

from __future__ import annotations

import os
from pathlib import Path

from raypipe.runtime.hosts.devices import physical_cores


def test_hyperthreads_of_a_core_count_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(cpu)).write_text(siblings + "\n")
    assert physical_cores(str(tmp_path / "{}")) == 2
    (tmp_path / "3").unlink()
    assert physical_cores(str(tmp_path / "{}")) == 4  # as far as is known
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert physical_cores(str(tmp_path / "{}")) == 1


def test_this_machine_has_some() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
