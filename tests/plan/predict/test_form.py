"""Forms say what the families' own schedules are."""

from __future__ import annotations

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.predict.form import Form
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.shape import Shape
from tests.plan.conftest import form_on


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_form_is_that_of_the_schedules(name: str) -> None:
    family = SCHEDULES[name]
    made = 0
    for devices in (1, 2, 3, 4, 6):
        for chunks in [1, 2, 3, 5] if "chunks" in family.options else [family.fixed_chunks or 1]:
            for pipelines in [2, 4] if "pipelines" in family.options else [2]:
                result = form_on(devices, name, chunks=chunks, pipelines=pipelines)
                for count in (2 * devices, 12):
                    shape = Shape(devices=devices, microbatches=count, chunks=chunks, pipelines=pipelines)
                    try:
                        form = Form.of(generate(name, shape), "")
                    except ScheduleError:
                        assert isinstance(result, ScheduleError)
                        continue
                    made += 1
                    assert isinstance(result, Form)
                    for field in ("placement", "joint", "recomputes", "versions", "size", "skips_first_b"):
                        assert getattr(result, field) == getattr(form, field), (shape, field)
    assert made


def test_alias_is_the_first_family_that_makes_the_same() -> None:
    """Looked up for a few chunks only; held here against schedules of more."""
    for name, family in SCHEDULES.items():
        for chunks in (1, 2, 3, 4, 5) if "chunks" in family.options else ():
            result = form_on(4, name, chunks=chunks)
            shape = Shape(devices=4, microbatches=10, chunks=chunks)
            assert isinstance(result, Form)
            if "chunks" in SCHEDULES[result.alias].options:
                own, other = generate(name, shape), generate(result.alias, shape)
                assert (own.placement, own.orders, own.rules) == (other.placement, other.orders, other.rules)
