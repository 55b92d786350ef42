"""A shape's keys are keys of ``parallel``, and nobody lists them a second time."""

from __future__ import annotations

from dataclasses import fields

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.plan.candidate import Candidate
from raypipe.schedule.shape import NEUTRAL, Grid


def test_every_option_of_a_shape_is_a_key_with_the_same_default() -> None:
    for key, neutral in NEUTRAL.items():
        assert ParallelSpec.model_fields[key].default == neutral, key


def test_the_keys_of_a_plan_are_the_fields_of_its_candidate() -> None:
    """With another value than its default, each is in the plan's ``parallel`` section and in its schedule's shape."""
    words = {"concat": "halving", "vocabulary": "split"}
    numbers = {key: 2 if value is None else 2 * value for key, value in NEUTRAL.items() if key not in words}
    other = {**numbers, **words}
    c = Candidate.on(Grid(4, 2, 3, 8), "zeropp", **other)
    spec = c.parallel()
    shape = spec.shape(48)
    assert (shape.devices, shape.microbatches, shape.options) == (4, 8, other)
    same = {f.name for f in fields(Candidate)} - {"microbatches", "balance"}
    assert {key: getattr(spec, key) for key in same} == {key: getattr(c, key) for key in same}
