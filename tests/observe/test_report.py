"""The report of a run: its numbers are those of the run's files, and no text of theirs becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raypipe.cli import run as command
from raypipe.observe.report import report_page
from raypipe.observe.run_log import RunLog, read_rows
from raypipe.observe.run_record import read_run
from tests.observe.html_page import Page
from tests.observe.recorded import record_run

NASTY = "</title><script>alert(1)</script><img src=http://x.example/ onerror=alert(2)>\"'"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run with everything in it, every text of it hostile."""
    record_run(tmp_path, NASTY)
    return tmp_path


def test_no_text_of_a_run_becomes_markup_and_nothing_is_fetched(directory: Path) -> None:
    text = report_page(read_run(directory))
    page = Page(text)
    assert NASTY in page.texts("h1")[0]
    assert not page.texts("script")
    for name, attributes, _ in page.elements:
        assert name not in ("img", "link", "iframe", "object", "script")
        assert not any(key.startswith("on") or key == "src" for key in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page.texts("style")[0]
    assert "@import" not in page.texts("style")[0]


def test_all_sections(directory: Path) -> None:
    page = Page(report_page(read_run(directory)))
    tasks = [title for title in page.texts("title") if re.match(r"\d+[A-Z]+", title)]
    assert len(tasks) == 4
    assert "0F0: forward, stage 0, micro-batch 0; device 0, 0 to 100 ms (100 ms)" in tasks
    rows = page.texts("tr")
    assert "31" + NASTY in "".join(rows)
    assert any("fastest" in row for row in rows)
    memory = next(row for row in rows if row.startswith("device 0"))
    assert memory == "device 03.0 GiB2.0 GiB+50.0%8.0 GiB"
    told = "\n".join(rows)
    for words in ("replanned: ", "gained -1.0% per step, so it is reverted", "update undone", "restarting from the"):
        assert words in told
    assert page.texts("small") == ["finished"]
    points = [title for title in page.texts("title") if title.startswith("training, step ")]
    assert points == ["training, step 1: 3", "training, step 3: 1"]  # the loss of step 2 was not a number


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.event("run", resume=False, devices=2, cores=None)
    page = Page(report_page(read_run(tmp_path)))
    assert page.texts("small") == ["starting"]
    assert len(page.texts("section")) == 7


def test_damaged_files_are_named(directory: Path) -> None:
    (directory / "timeline.json").write_text('{"predicted": {"spans": [[{"task": "what"}]]')
    (directory / "plan.json").write_text("[]")
    page = Page(report_page(read_run(directory)))
    assert [text.split(":")[1] for text in page.texts("p", **{"class": "bad"})] == [" plan.json", " timeline.json"]


def test_the_command(directory: Path, tmp_path: Path, capsys) -> None:
    assert command(["report", str(directory)]) == 0
    assert (directory / "report.html").read_text().startswith("<!DOCTYPE html>")
    said = capsys.readouterr().out
    assert "step measured    0.2500 s (median)" in said
    assert "3.0 GiB planned, 2.0 GiB measured" in said
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    for name, why in ((elsewhere, "holds no run"), (tmp_path / "nothing", "there is no such folder")):
        assert command(["report", str(name)]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.runs
def test_the_numbers_are_those_of_a_run(stage_pool, text_folder: Path, tmp_path: Path) -> None:
    from raypipe.observe.timelines import save_timelines
    from tests.runtime.runs.small_runs import drive, small_job

    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2}, steps=12, eval_every=6)
    done = drive(job, stage_pool, tmp_path)
    driver = done.driver
    (tmp_path / "job.json").write_text(json.dumps(job.model_dump(mode="json")))
    driver.running.plan.save(tmp_path / "plan.json")
    prediction = driver.clock.prediction
    save_timelines(tmp_path, prediction.timeline if prediction else None, driver.clock.measured())
    log = RunLog(tmp_path)
    log.event("finished", counts=driver.counts, memory_bytes=driver.memory_bytes)

    page = Page(report_page(read_run(tmp_path)))
    rows = read_rows(tmp_path / "metrics.jsonl")

    def points(name: str, chart: int) -> dict[int, float]:
        figure = [e for e in page.elements if e[0] == "figure"][chart]
        result = re.findall(rf"{name}, step (\d+): ([0-9.e+-]+)", "\n".join(figure[2]))
        return {int(number): float(value) for number, value in result}

    for name, chart, key in (
        ("training", 0, "loss"), ("validation", 0, "val_loss"), ("measured", 1, "step_s"),
        ("measured", 2, "bubble_ratio"),
    ):  # fmt: skip
        expected = {row["step"]: row[key] for row in rows if key in row}
        assert points(name, chart) == pytest.approx(expected, rel=1e-5), key
        assert expected
    both = json.loads((tmp_path / "timeline.json").read_text())
    spans = [s for step in both.values() for lane in step["spans"] for s in lane]
    said = re.findall(r"(\d+[A-Z]+\d*): .*? ([0-9.e+-]+) to ([0-9.e+-]+) ms", "\n".join(page.texts("title")))
    assert sorted(task for task, _, _ in said) == sorted(s["task"] for s in spans)
    times = sorted(float(end) for _, _, end in said)
    assert times == pytest.approx(sorted(1e3 * s["end"] for s in spans), rel=1e-3, abs=1e-3)
    peaks = [title for _, a, _ in page.elements if (title := a.get("title"))]
    assert peaks == [f"{size:,} bytes" for size in driver.memory_bytes]
