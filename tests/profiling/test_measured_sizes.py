"""Ctrl-C on a terminal leaves a profile at what is measured, and the time left is shown there."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rich.console import Console

from raypipe.cost.profile import Noise
from raypipe.observe.progress import Notes
from raypipe.profiling.effort import QUICK, THOROUGH, Effort
from raypipe.profiling.profile_job import measure_sizes
from raypipe.signals import Interrupted, Terminated, end_on_signals

SIZES = [1, 2, 4, 8]
pytestmark = pytest.mark.usefixtures("pythons_own_handlers")


class Bench:
    """Instead of a ``LayerBench``; calls a function after a size."""

    measured, long, interrupted = (0,), False, False
    model, workers = SimpleNamespace(count=1), SimpleNamespace(actors=[None])

    def __init__(self, after: int, then: Callable[[], object]) -> None:
        self.passes: dict[int, int] = {}
        self.stolen = {0: 0.0}
        self._after, self._then = after, then

    def fits(self, size: int, room: float) -> bool:
        return size * 1.0 <= room

    def step_seconds(self, size: int) -> float:
        return 1.0

    def measure(self, size: int, effort: Effort, memory: bool, alone: bool = False) -> None:
        if size == self._after and size not in self.passes:
            self._then()
        self.passes[size] = self.passes.get(size, 0) + 1


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def measured(bench: Bench, effort: Effort, say: Callable[[str], None]) -> Noise:
    return measure_sizes(bench, list(SIZES), effort, say, 8.0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("effort", [QUICK, THOROUGH])
def test_ctrl_c_after_the_first_size_goes_on_with_what_there_is(effort, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    bench, said = Bench(2, interrupt), []
    with end_on_signals():
        assert measured(bench, effort, said.append) == Noise(stolen=0.0)
        assert bench.passes == {1: 1, 2: 1}
        assert bench.interrupted
        assert said[-1] == "interrupted: going on with micro-batches of 1, 2 as measured"
        with pytest.raises(Interrupted):
            interrupt()  # the next one ends the command


def test_ctrl_c_ends_the_command_before_the_first_size_and_where_there_is_no_terminal(monkeypatch) -> None:
    with end_on_signals(), pytest.raises(Interrupted):
        measured(Bench(2, interrupt), QUICK, print)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with end_on_signals(), pytest.raises(Interrupted):
        measured(Bench(1, interrupt), QUICK, print)
    with end_on_signals(), pytest.raises(Terminated):
        measured(Bench(2, lambda: signal.raise_signal(signal.SIGTERM)), QUICK, print)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_time_left_is_shown_on_a_terminal_alone(terminal: bool) -> None:
    out = io.StringIO()
    shown: list[str] = []
    bench = Bench(2, lambda: shown.append(out.getvalue()))
    bench.drift = lambda *_: 0.0  # type: ignore[attr-defined]
    measured(bench, QUICK, Notes(Console(file=out, force_terminal=terminal, color_system=None, width=80)))
    assert ("s left" in shown[0]) is terminal
    assert "micro-batches of 1, 2, 4, 8: 1 of 1 layers on each of 1 devices" in out.getvalue()
