"""Marks in a device's stream become times of this host; here the device is a simulated one, behind its host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from raypipe.runtime.executor.runner import ProgramRunner
from raypipe.runtime.process.clock import EventClock, HostClock, clock_for
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.kinds import KINDS
from raypipe.schedule.lowering.programs import Action, Program

WAKE_S = 30e-6


@dataclass
class Gpu:
    """Kernels queue up: the host launches in no time and the device works them off one after another."""

    host: float = 1000.0
    free: float = 1000.0
    """When the device has done all that was launched."""
    boot: float = 7.0
    """The device's own clock, which events read, began with another number."""
    waits: int = 0
    made: list[FakeEvent] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.host += 1e-5
        self.free = max(self.free, self.host) + seconds

    def event(self) -> FakeEvent:
        self.made.append(FakeEvent(self))
        return self.made[-1]


@dataclass
class FakeEvent:
    """As ``torch.cuda.Event``: knows its time on the device's clock, and only once the device has come to it."""

    gpu: Gpu
    at: float = -1.0

    def record(self) -> None:
        self.at = max(self.gpu.free, self.gpu.host)

    def query(self) -> bool:
        return self.at <= self.gpu.host

    def synchronize(self) -> None:
        if self.query():
            return
        self.gpu.waits += 1
        self.gpu.host = max(self.gpu.host, self.at) + WAKE_S

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert end_event.at <= self.gpu.host, "not complete yet: torch raises here"
        single = np.float32((end_event.at - self.at) * 1e3)
        return float(single)


class Kernels(ProgramRunner):
    """Launches a kernel a task."""

    def __init__(self, gpu: Gpu, seconds: list[float]) -> None:
        super().__init__(2, 1.0, {}, {}, {})
        self.gpu, self.seconds = gpu, seconds
        self.clock = EventClock(gpu.event, lambda: gpu.host)
        self.true: list[tuple[float, float]] = []
        self.handlers = dict.fromkeys(KINDS, Kernels.launch)

    def launch(self, action: Action) -> None:
        assert self.gpu.waits == self.step, "the host waited inside a step"
        start = max(self.gpu.free, self.gpu.host)
        self.gpu.launch(self.seconds[len(self.true) % len(self.seconds)])
        self.true.append((start, self.gpu.free))


def test_spans_are_those_of_the_kernels() -> None:
    order = from_text("device 0: 0F0 0F1 0BW0 0BW1", "here").orders[0]
    program = Program(0, tuple(Action(task, (), ()) for task in order), {}, frozenset(), frozenset())
    gpu = Gpu()
    runner = Kernels(gpu, [0.010, 0.011, 0.020, 0.019])
    for step in range(3):
        runner.true = []
        times = runner.walk(program, step)
        # Exact but for the host's waking and the events' single precision.
        assert times == pytest.approx(np.array(runner.true) + WAKE_S, abs=1e-8)
        assert gpu.waits == step + 1
        gpu.host += 0.5  # between two steps the device may stand still
    assert len(gpu.made) == 2 * len(order) + 2  # used again in every step, but for the last one of the step before


def test_a_mark_waits_for_nothing_and_may_be_left_out_of_the_result() -> None:
    gpu = Gpu()
    clock = EventClock(gpu.event, lambda: gpu.host)
    clock.begin()
    waits = gpu.waits
    gpu.launch(1.0)  # or a message for which the device waits
    first = clock.mark()
    gpu.launch(2.0)
    clock.mark()  # of an attempt that was given up
    gpu.launch(3.0)
    third = clock.mark()
    assert gpu.waits == waits
    begun, ended = clock.end(np.array([first, third])).times()
    assert ended - begun == pytest.approx(5.0, abs=1e-6)
    assert ended == pytest.approx(gpu.host)


def test_times_read_long_after_the_step_are_those_of_the_step() -> None:
    """Step k's times are read when step k + 1 is queued; the device may have ended k long before, or not yet."""
    gpu = Gpu()
    clock = EventClock(gpu.event, lambda: gpu.host)
    begins, steps = [], []
    for step in range(5):
        clock.begin()
        begins.append(max(gpu.free, gpu.host))
        first = clock.mark()
        gpu.launch(0.010)
        steps.append(clock.end(np.array([first, clock.mark()])))
        gpu.host += 0.5 if step % 2 else 0.0  # the host comes back late after every other step
        if step:
            times = steps[step - 1].times()
            assert times == pytest.approx([begins[step - 1], begins[step - 1] + 0.010], abs=1e-4)
    assert not steps[-1].ready()
    assert steps[-1].times()[1] == pytest.approx(gpu.host, abs=1e-4)
    assert gpu.waits


def test_the_host_keeps_time_where_calls_return_when_done() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    marks = np.array([clock.mark(), clock.mark()])
    assert clock.end(marks).times() is marks
    assert marks[0] <= marks[1]
    assert isinstance(clock_for(torch.device("cuda", 0)), EventClock)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    clock = clock_for(torch.device("cuda", 0))
    x = torch.randn(4096, 4096, device="cuda")
    (x @ x).sum().item()
    clock.begin()
    begun = clock.mark()
    for _ in range(50):
        y = x @ x
    launched, ended = HostClock().mark(), clock.mark()
    host = HostClock().mark()
    start, end = clock.end(np.array([begun, ended])).times()
    assert y.isfinite().all()
    assert end > launched
    assert end - start > 50 * 2 * 4096**3 / 1e15  # no GPU does 10^15 single-precision operations a second
    assert start < host
