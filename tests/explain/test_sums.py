"""For any schedule and any times, the causes sum to what is lost, and a replay with nothing mended is the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raypipe.explain.causes import explain
from raypipe.explain.measured import Measured
from raypipe.explain.replay import Replay
from raypipe.plan.online.recorded_steps import RecordedStep, StepWaits
from raypipe.schedule.costs import CostTable
from tests.explain.simulated_steps import message_waits, run_steps, whole_step

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "chimera", "bfs", "zb-v")


@pytest.mark.slow
@settings(max_examples=60, phases=[Phase.generate])  # shrinking takes minutes, and seeds say nothing
@given(st.data())
def test_causes_sum_to_what_is_lost(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    devices, replicas = data.draw(st.sampled_from([2, 4])), data.draw(st.sampled_from([1, 2]))
    chunks = {"chunks": 2} if name in ("interleaved-1f1b", "bfs") else {}
    schedule = whole_step(name, devices, devices * data.draw(st.integers(1, 2)), replicas, **chunks)
    numbers = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    stages = schedule.stages

    def some() -> tuple[float, ...]:
        return tuple(numbers.uniform(0.5, 2.0, stages))

    costs = replace(
        CostTable.even(stages), forward=some(), input_grad=some(), weight_grad=some(), update=some(),
        all_reduce=tuple(numbers.uniform(0, 3, stages)), comm=tuple(numbers.uniform(0, 1, stages)),
    )  # fmt: skip
    jitter = numbers.uniform(0.8, 1.6, (4, sum(map(len, schedule.orders))))
    norm = data.draw(st.sampled_from(["none", "wait"]))
    steps = run_steps(schedule, costs, steps=data.draw(st.integers(1, 4)), gap=float(numbers.uniform(0, 2)),
                      slower=lambda step, i: float(jitter[step, i]), norm=norm)  # fmt: skip
    late = data.draw(st.sampled_from([None, 0.0, 0.3, 1.0]))  # whatever the devices say
    message_s = [
        () if late is None else message_waits(schedule, s, lambda _: float(numbers.uniform(0, late))) for s in steps
    ]
    data_s = tuple(numbers.uniform(0, 1, schedule.devices))
    recorded = tuple(
        RecordedStep(s.number, s.times, StepWaits(data_s=data_s, message_s=one))
        for s, one in zip(steps, message_s, strict=True)
    )
    of = Measured(schedule=schedule, steps=recorded, norm=norm)
    replay = Replay(of)
    assert replay.step_s() == pytest.approx(replay.measured_s, rel=1e-9)
    found = explain(replay)
    assert sum(c.seconds for c in found.causes) == pytest.approx(found.step_s - found.ideal_s, abs=1e-9 * found.step_s)
    assert [c.seconds for c in found.causes] == sorted((c.seconds for c in found.causes), reverse=True)
    for cause in found.causes:
        assert sum(cause.devices.values()) == pytest.approx(cause.seconds) or not cause.devices
