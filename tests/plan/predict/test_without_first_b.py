"""Families whose first stage has no B: its W still runs back through its layers, as a clock of its own has it."""

from __future__ import annotations

import pytest

from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import deepest
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.shape import Grid
from tests.plan.conftest import make_job, make_profile
from tests.plan.joint.clock import Before, Layer, Timed, period, time_of


@pytest.mark.parametrize(("schedule", "chunks"), [("modulo", 1), ("modulo", 2), ("zb-h1", 1)])
def test_the_step_is_what_the_clock_says(schedule: str, chunks: int) -> None:
    profile = make_profile(layers=8, devices=2).model_copy(update={"update_s_per_parameter": 0.0})
    job = make_job(layers=8, batch=8)
    judge = Predictor(profile, job.train, deepest(job, profile))
    p = judge.predict(Candidate.on(Grid(2, 1, 1, 8), schedule, chunks=chunks))
    layers = [
        Layer(t.forward, t.input_grad, t.weight_grad, t.joint, 0.0, 0.0, 0.0)
        for t in (x.times[1] for x in profile.layers)
    ]
    messages = [profile.inside.seconds(x.output_bytes) for x in profile.layers]
    text, cut = to_text(judge.schedule_of(p)), [list(own) for own in p.cut]

    def step(before: Before | None) -> Timed:
        return time_of(text, cut, layers, messages, before=before)

    assert p.step_s == pytest.approx(period(step, dict.fromkeys(range(len(cut)), 0.0), 6)[0], rel=1e-9)
    all_tasks = 8 * sum(x.forward + x.input_grad + x.weight_grad for x in layers)
    left_out = 8 * layers[0].input_grad if schedule == "modulo" else 0.0
    assert 2 * p.busy_s == pytest.approx(all_tasks - left_out, rel=1e-9)
