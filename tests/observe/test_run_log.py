"""The logs of a run: each row readable at once, each seen once, and steps that run again written once."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.files import open_regular
from raypipe.observe import run_log
from raypipe.observe.run_log import EVENTS, METRICS, Follower, RunLog, mend, read_rows, rewind


@pytest.fixture
def log(tmp_path: Path):
    return RunLog(tmp_path)


def test_a_row_is_there_for_readers_as_soon_as_it_is_written(log, tmp_path) -> None:
    log.metric({"step": 1, "loss": 2.5})
    log.event("started", devices=[], resumed_from=None)
    assert read_rows(tmp_path / METRICS) == [{"step": 1, "loss": 2.5}]
    (event,) = read_rows(tmp_path / EVENTS)
    assert event.pop("time") > 1e9  # seconds since 1970
    assert event == {"event": "started", "devices": [], "resumed_from": None}


def test_numbers_keep_every_digit(log, tmp_path) -> None:
    """Losses are compared digit by digit."""
    losses = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308]
    for step, loss in enumerate(losses):
        log.metric({"step": step, "loss": loss})
    assert [row["loss"] for row in read_rows(tmp_path / METRICS)] == losses


def test_a_second_attempt_appends(log, tmp_path) -> None:
    log.metric({"step": 1})
    again = RunLog(tmp_path)
    again.metric({"step": 2})
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1, 2]


def test_a_follower_sees_each_row_once_and_only_whole_ones(log, tmp_path) -> None:
    follower = Follower(tmp_path / METRICS)
    assert list(follower.new_rows()) == []
    log.metric({"step": 1})
    log.metric({"step": 2})
    assert [row["step"] for row in follower.new_rows()] == [1, 2]
    assert list(follower.new_rows()) == []
    with (tmp_path / METRICS).open("a") as half:
        half.write('{"step": 3, "note": "é')
        half.flush()
        assert list(follower.new_rows()) == []
        half.write('"}\n')
    assert [row["step"] for row in follower.new_rows()] == [3]


def test_a_log_that_is_not_there_yet(tmp_path) -> None:
    follower = Follower(tmp_path / METRICS)
    assert list(follower.new_rows()) == []
    assert read_rows(tmp_path / METRICS) == []
    log = RunLog(tmp_path)
    log.metric({"step": 1})
    assert [row["step"] for row in follower.new_rows()] == [1]


def test_rewinding_forgets_what_will_run_again(log, tmp_path) -> None:
    for step in range(1, 6):
        log.metric({"step": step, "loss": 1.0})
    log.metric({"step": 5, "val_loss": 2.0})
    rewind(tmp_path, 3)
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [EVENTS, METRICS]  # nothing half-written is left
    rewind(tmp_path, 0)
    assert read_rows(tmp_path / METRICS) == []


def test_rewinding_keeps_the_validation_of_the_step_it_goes_back_to(log, tmp_path) -> None:
    log.metric({"step": 3, "loss": 1.0})
    log.metric({"step": 3, "val_loss": 2.0})
    log.metric({"step": 4, "loss": 1.0})
    rewind(tmp_path, 3)
    assert read_rows(tmp_path / METRICS) == [{"step": 3, "loss": 1.0}, {"step": 3, "val_loss": 2.0}]


def test_rewinding_drops_a_line_that_a_crash_cut_short(tmp_path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"step": 2, "lo')
    rewind(tmp_path, 5)
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n'
    rewind(tmp_path / "nowhere", 5)  # no run yet: nothing to do


def test_a_follower_of_a_rewound_log_sees_only_what_is_run_again(log, tmp_path) -> None:
    follower = Follower(tmp_path / METRICS)
    for step in (1, 2, 3):
        log.metric({"step": step})
    assert len(list(follower.new_rows())) == 3
    rewind(tmp_path, 1)
    assert list(follower.new_rows()) == []
    again = RunLog(tmp_path)
    again.metric({"step": 2})
    assert [row["step"] for row in follower.new_rows()] == [2]


def test_a_damaged_row_in_the_middle_is_dropped_and_no_other(tmp_path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 2}\n{"step": 3}\n')
    follower = Follower(tmp_path / METRICS)
    assert len(list(follower.new_rows())) == 3
    rewind(tmp_path, 2)
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [row["step"] for row in follower.new_rows()] == [1, 2]  # of a new file nobody knows what was read


def test_a_log_replaced_while_it_is_opened(tmp_path, monkeypatch) -> None:
    """The rows and the place in the file belong to the same file, also if a restart rewinds it in between."""
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2}\n')
    follower = Follower(path)

    def open_then_replace(path: Path) -> object:
        file = open_regular(path)
        monkeypatch.undo()
        new = tmp_path / "new"
        new.write_text('{"step": 1}\n{"step": 9}\n')
        new.replace(path)
        return file

    monkeypatch.setattr(run_log, "open_regular", open_then_replace)
    seen = [row["step"] for row in follower.new_rows()]
    seen += [row["step"] for row in follower.new_rows()]
    assert seen == [1, 2, 1, 9]  # the new file from its start


def test_a_log_that_is_replaced_while_it_is_written_goes_on(log, tmp_path) -> None:
    """A damaged line among those that are kept has the file written anew, while the driver has it."""
    log.metric({"step": 1})
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"step": 2, "lo')
    log.metric({"step": 3})
    assert rewind(tmp_path, 3) == 0
    log.metric({"step": 4})
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n{"step": 3}\n{"step": 4}\n'


def test_a_row_that_a_full_disk_has_cut_short_spoils_no_other(log, tmp_path) -> None:
    log.event("begins")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / EVENTS).stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match=EVENTS):
            log.event("refused")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.event("ends")
    assert [row["event"] for row in read_rows(tmp_path / EVENTS)] == ["begins", "ends"]
    assert b"refused" not in (tmp_path / EVENTS).read_bytes()


def test_an_event_cut_short_by_a_crash_spoils_no_other(tmp_path) -> None:
    (tmp_path / EVENTS).write_text('{"event": "run", "resume": false}\n{"event": "sta')
    log = RunLog(tmp_path)
    log.event("run", resume=True)
    rows = read_rows(tmp_path / EVENTS)
    assert [(row["event"], row["resume"]) for row in rows] == [("run", False), ("run", True)]


def test_rows_are_lines_of_json_whatever_they_say(log, tmp_path) -> None:
    log.event("notice", message='two\nlines, "quotes", \u2028 and é')
    text = (tmp_path / EVENTS).read_text(encoding="utf-8")
    assert text.count("\n") == 1
    assert json.loads(text)["message"] == 'two\nlines, "quotes", \u2028 and é'
    assert os.path.getsize(tmp_path / METRICS) == 0


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x00", b"[]", b"3", b'"x"', b"null", b"[" * 100_000, b'{"step": null}', b"{}"]
)
def test_a_damaged_line_is_passed_over_by_whoever_reads(tmp_path, damage) -> None:
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1, 2]
    rewind(tmp_path, 2)
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.slow
@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([b'{"step": 1}', b'{"event": "x"}', b'{"step": "1"}']), max_size=5
    )
)
def test_any_bytes_are_rows_or_passed_over(lines) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        for log in (METRICS, EVENTS):
            (directory / log).write_bytes(b"\n".join(lines))
            before = read_rows(directory / log)
            mend(directory / log)
            assert not mend(directory / log)  # once
            assert read_rows(directory / log)[: len(before)] == before
        rewind(directory, 1)
        assert all(row["step"] <= 1 for row in read_rows(directory / METRICS))
