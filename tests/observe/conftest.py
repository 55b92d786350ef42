from dataclasses import replace

import pytest

from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.text import from_text
from raypipe.simulate.engine import simulate


@pytest.fixture
def timeline():
    """Make the timeline of a named schedule."""

    def make(name, devices=4, microbatches=4, forward=1.0, input_grad=1.0, comm=0.0, **options):
        shape = Shape(devices=devices, microbatches=microbatches, **options)
        costs = CostTable.even(stages_of(name, shape), forward, input_grad, comm=comm)
        return simulate(generate(name, shape, costs), costs)

    return make


@pytest.fixture
def written():
    """Make the timeline of a schedule in text form."""

    def make(text, all_reduce=0.0, **costs):
        schedule = from_text(text, "written")
        table = CostTable.even(schedule.stages, **costs)
        return simulate(schedule, replace(table, all_reduce=(all_reduce,) * schedule.stages))

    return make
