"""What a person sees of a run: read from its logs alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from raypipe.observe import progress
from raypipe.observe.progress import ProgressView
from raypipe.observe.run_log import RunLog, rewind

STEPS = 100


def step(number: int, loss: float = 2.5) -> dict[str, object]:
    return {
        "step": number, "loss": loss, "grad_norm": 1.0, "lr": 0.001, "step_s": 0.25, "tokens_per_s": 16384.0,
        "bubble_ratio": 0.125,
    }  # fmt: skip


class Run:
    """A run's logs beside the view that follows them; the clock stands still until it is moved."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool = False) -> None:
        self.log = RunLog(directory)
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=110, color_system=None)
        self.view = ProgressView(directory, STEPS, console)

    def said(self) -> list[str]:
        """Lines that are new since the last call."""
        self.view.update()
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text.splitlines()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    return Run(tmp_path, monkeypatch)


def test_the_start_names_every_device(run) -> None:
    devices = [
        {"name": f"stage {i} · replica 0", "node": "n", "device": "cpu", "pid": 1, "parameters": 400000 + i}
        for i in range(2)
    ]
    run.log.event("started", devices=devices, resumed_from=None)
    assert run.said() == [
        "stage 0 · replica 0 on cpu, 400,000 parameters", "stage 1 · replica 0 on cpu, 400,001 parameters"
    ]  # fmt: skip
    run.log.event("started", devices=[], resumed_from=50)
    assert run.said() == ["resumed from step 50"]


def test_a_step_is_one_line_with_loss_speed_idle_time_and_what_is_left(run) -> None:
    run.log.metric(step(1))
    assert run.said() == ["step     1/100  loss 2.5000  0.250 s  16,384 tokens/s  idle 12.5%  25 s left"]


def test_the_predicted_idle_time_stands_beside_the_measured_one(run) -> None:
    run.log.event("predicted", step=7, step_s=0.2, bubble_ratio=0.111)
    assert run.said() == ["predicted step 0.2000 s, 11.1% idle"]
    run.log.metric(step(8))
    assert "idle 12.5% (plan 11.1%)" in run.said()[0]


def test_without_a_terminal_lines_come_every_few_seconds_and_the_last_always(run) -> None:
    run.log.metric(step(1))
    assert len(run.said()) == 1
    for number in range(2, 50):
        run.log.metric(step(number))
    assert run.said() == []
    run.now += progress.PLAIN_EVERY_S
    run.log.metric(step(50))
    assert [line.split()[1] for line in run.said()] == ["50/100"]
    run.log.metric(step(100))
    assert [line.split()[1] for line in run.said()] == ["100/100"]


def test_validations_failures_restarts_and_notices_are_told(run) -> None:
    run.log.metric({"step": 20, "val_loss": 1.98768})
    run.log.event("failed", message="stage 1 · replica 0: connection lost")
    run.log.event("restarted", checkpoint=None)
    run.log.event("restarted", checkpoint="/runs/a/checkpoints/step-00000020")
    run.log.event("notice", message="passed over: step-00000040 is damaged")
    assert sorted(run.said()) == sorted(
        [
            "step    20  validation loss 1.9877",
            "failed: stage 1 · replica 0: connection lost",
            "restarting from the start",
            "restarting from /runs/a/checkpoints/step-00000020",
            "note: passed over: step-00000040 is damaged",
        ]
    )


def test_text_is_shown_as_it_is(run) -> None:
    run.log.event("notice", message="[red]not a colour[/red] [/] :smile: " + "long " * 60)
    text = "note: [red]not a colour[/red] [/] :smile: " + "long " * 60
    assert [line.rstrip() for line in run.said()] == [text.rstrip()]  # not every rich keeps a space at the end


def test_unknown_events_of_later_versions_are_passed_over(run) -> None:
    run.log.event("of_a_later_version", program="b")
    assert run.said() == []


def test_a_resumed_run_does_not_repeat_its_past(run) -> None:
    run.log.metric(step(1))
    run.log.event("started", devices=[], resumed_from=7)
    run.view.skip_past()
    assert run.said() == []
    run.log.metric(step(2))
    assert [line.split()[1] for line in run.said()] == ["2/100"]


def test_a_resume_that_forgets_the_steps_after_its_checkpoint_tells_only_what_is_new(run, tmp_path) -> None:
    for number in range(1, 9):
        run.log.metric(step(number))
    run.view.skip_past()
    rewind(tmp_path, 5)
    assert run.said() == []
    run.log.event("started", devices=[], resumed_from=5)
    run.log.metric(step(6))
    assert [" ".join(line.split()[:4]) for line in run.said()] == ["resumed from step 5", "step 6/100 loss 2.5000"]


def test_closing_shows_what_came_last(run) -> None:
    run.log.metric({"step": 100, "val_loss": 2.0})
    run.view.close()
    assert "validation loss 2.0000" in run.out.getvalue()


def test_on_a_terminal_there_is_one_live_line(tmp_path, monkeypatch) -> None:
    run = Run(tmp_path, monkeypatch, terminal=True)
    for number in range(1, 51):
        run.log.metric(step(number))
    run.log.metric({"step": 50, "val_loss": 2.0})
    run.view.close()
    text = run.out.getvalue()
    assert "step 50/100" in text
    assert "16,384 tokens/s" in text
    assert "validation loss 2.0000" in text
    assert text.count("step 49/100") <= 1  # steps are not lines of their own


def test_a_wait_for_devices_is_said_with_what_is_missing(run) -> None:
    run.log.event("waiting", message="needs 2 CPUs, 0 free, waiting 0:42")
    assert run.said() == ["needs 2 CPUs, 0 free, waiting 0:42"]
