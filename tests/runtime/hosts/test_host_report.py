"""What a node reports of itself: the run's storage, whether it may write there, its versions."""

from __future__ import annotations

from pathlib import Path

from raypipe.runtime.hosts import host_report
from raypipe.runtime.hosts.host_report import HostQuestion, report_host, versions


def test_a_report_says_what_is_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_report, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(host_report, "use_interface", lambda *_: None)
    ask = HostQuestion(tmp_path, ".shared-1", "10.0.0.1", one_host=False)
    assert not report_host(ask, "10.0.0.2").shared
    (tmp_path / ".shared-1").write_text("of another run")
    assert not report_host(ask, "10.0.0.2").shared
    (tmp_path / ".shared-1").write_text(".shared-1")
    found = report_host(ask, "10.0.0.2")
    assert (found.shared, found.has_data, found.refusal) == (True, False, "")
    assert found.versions == versions()
    assert [p.name for p in tmp_path.iterdir()] == [".shared-1"]


def test_a_folder_that_cannot_be_written_into(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_report, "use_interface", lambda *_: None)
    (tmp_path / ".shared-1").write_text(".shared-1")
    monkeypatch.setattr(Path, "touch", refuse)
    found = report_host(HostQuestion(tmp_path, ".shared-1", "10.0.0.1", one_host=False), "10.0.0.2")
    assert (found.shared, found.refusal) == (True, "Permission denied")
