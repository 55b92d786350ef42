"""A profile notices what disturbed it: on made-up measurements, so that no test depends on how busy a machine is.

``python -m tests.bench.accuracy.noisy_profile`` shows the same with processes that take the cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from raypipe.cost.profile import LIMIT, Noise
from raypipe.profiling.effort import QUICK, THOROUGH, Effort
from raypipe.profiling.profile_job import measure_again
from raypipe.profiling.profiled_steps import Samples, charge, drift, measured_step, own_seconds, stolen, task_times

HERE, GROUPS = [0, 1], [0, 1]
ORDER = measured_step(2, HERE, "joint").orders[0]
TASKS = len(ORDER)


def samples(taken: float, ran: float | np.ndarray) -> Samples:
    """Two steps in which every task takes ``taken`` seconds and its thread runs for ``ran``."""
    starts = np.arange(TASKS) * 2 * taken
    times = np.stack([starts, starts + taken], axis=1)
    threads = np.broadcast_to(np.asarray(ran, dtype=float), (2, TASKS))
    return Samples(ORDER, np.stack([times, times]), threads.copy(), np.zeros((0, 3), dtype=np.int64))


def test_what_a_thread_did_not_run_was_taken_from_it() -> None:
    quiet, half = samples(2e-3, 1.99e-3), samples(4e-3, 2e-3)
    assert stolen([quiet]) == pytest.approx(0.005)
    assert stolen([quiet, half]) == pytest.approx(0.5)  # the device that it happened to
    assert stolen([samples(2e-3, np.nan)]) == 0.0  # a GPU


def test_a_disturbed_task_counts_as_long_as_its_thread_ran() -> None:
    ran = np.full(TASKS, 2e-3)
    ran[::2] = 3.99e-3
    mixed = samples(4e-3, ran)
    assert own_seconds(mixed)[0] == pytest.approx([4e-3 if k % 2 == 0 else 2e-3 for k in range(TASKS)])
    assert own_seconds(samples(40e-6, 10e-6)) == pytest.approx(40e-6)  # shorter than the clocks are exact
    assert own_seconds(samples(4e-3, np.nan)) == pytest.approx(4e-3)
    result = task_times([samples(4e-3, 2e-3)], GROUPS)
    assert {key: taken.seconds for key, taken in result.items()} == pytest.approx(dict.fromkeys(result, 2e-3))


def test_what_daemons_take_is_charged_and_a_disturbance_is_not() -> None:
    quiet, shared, busy = samples(2e-3, 2e-3), samples(2e-3, 1.8e-3 - 1e-9), samples(4e-3, 2e-3)
    assert charge([quiet]) == 1.0
    assert charge([shared]) == pytest.approx(1 / 0.9)
    assert charge([quiet, shared]) == pytest.approx(2 / 1.9)
    assert charge([busy]) == 1 / (1 - LIMIT)
    assert charge([samples(2e-3, np.nan)]) == charge([]) == 1.0  # a GPU; nothing


def test_drift_is_the_larger_over_the_smaller() -> None:
    assert drift([(1.0, 1.0)]) == 0.0
    assert drift([(1.0, 1.25)]) == drift([(1.25, 1.0)]) == pytest.approx(0.25)
    assert drift([]) == 0.0


@dataclass
class Bench:
    """Instead of a ``LayerBench``: what its measurements would say, one after another."""

    stolen_next: list[float]
    """Of each measurement."""
    drifts: list[float]
    """Of each comparison."""
    stolen: dict[int, float] = field(default_factory=dict)
    measured: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for size in (1, 4, 16):
            self.measure(size, QUICK, memory=True)
        self.measured.clear()

    def measure(self, size: int, _effort: Effort, memory: bool) -> None:
        self.measured.append(size)
        self.stolen[size] = min(self.stolen.get(size, 1.0), self.stolen_next.pop(0))

    def forget(self, size: int) -> None:
        del self.stolen[size]

    def drift(self, _sizes: object, _effort: Effort) -> float:
        return self.drifts.pop(0)


@pytest.mark.parametrize(
    ("effort", "shares", "drifts", "measured", "left"),
    [
        (QUICK, [0.01, 0.02, 0.03], [0.04], [], Noise(stolen=0.03, drift=0.04)),
        # A short disturbance: only what it hit is measured again.
        (QUICK, [0.01, 0.4, 0.03, 0.02], [0.04, 0.01], [4], Noise(stolen=0.03, drift=0.01, again=1)),
        # The machine changed on the way: everything.
        (QUICK, [0.0, 0.0, 0.0, 0.01, 0.02, 0.0], [0.3, 0.05], [1, 4, 16], Noise(stolen=0.02, drift=0.05, again=3)),
        # It stays noisy: the attempts are bounded, and the least disturbed measurement counts.
        (QUICK, [0.5, 0.5, 0.5, 0.6, 0.4, 0.4], [0.0, 0.0], [1, 4, 16], Noise(stolen=0.5, drift=0.0, again=3)),
        (THOROUGH, [0.0, 0.0, 0.5, 0.4, 0.3], [0.0, 0.0, 0.0], [16, 16], Noise(stolen=0.3, drift=0.0, again=2)),
    ],
)
def test_disturbed_measurements_are_made_again(effort, shares, drifts, measured, left) -> None:
    bench = Bench(list(shares), list(drifts))
    said: list[str] = []
    assert measure_again(bench, effort, said.append, time.monotonic()) == left
    assert bench.measured == measured
    assert len(said) == len(drifts) - 1
    assert (left.warning() is not None) == (left.worst > LIMIT)


def test_nothing_is_made_again_for_ever() -> None:
    bench = Bench([0.5, 0.5, 0.5], [0.0])
    long_ago = time.monotonic() - QUICK.patience_s - 1
    assert measure_again(bench, QUICK, print, long_ago) == Noise(stolen=0.5)
    assert not bench.measured
