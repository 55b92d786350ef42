"""Every named schedule, on any shape and costs: a valid step or one clear error."""

from collections.abc import Iterator
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.passes import add_updates, fuse_backward, place_gradient_sync, replicate, split_backward
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period

VALUES: dict[str, st.SearchStrategy[object]] = {
    "chunks": st.integers(1, 3), "unit": st.integers(1, 14), "pipelines": st.sampled_from([2, 4, 6]),
    "concat": st.sampled_from(["direct", "doubling", "halving"]), "memory_limit": st.integers(1, 12),
    "slices": st.integers(1, 4), "vocabulary": st.just("split"),
}  # fmt: skip
"""What is tried for each option of a Shape."""
WRONG: dict[str, st.SearchStrategy[object]] = {
    **VALUES, "unit": st.integers(0, 15), "pipelines": st.sampled_from([1, 3]), "memory_limit": st.integers(0, 12),
    "slices": st.integers(0, 4), "vocabulary": st.just("halved"),
}  # fmt: skip
"""What is tried now and then beside them: values that no shape may have, and options that the family does not read."""


def test_every_option_of_a_shape_is_tried() -> None:
    assert set(VALUES) == {field.name for field in fields(Shape)} - {"devices", "microbatches"}


@st.composite
def shapes(draw: st.DrawFn, name: str) -> dict[str, object]:
    """Devices, micro-batches, about half of the family's own options, and seldom one that it has no use for."""
    result: dict[str, object] = {"devices": draw(st.integers(1, 6)), "microbatches": draw(st.integers(1, 14))}
    for key, values in VALUES.items():
        if key in SCHEDULES[name].options and draw(st.booleans()):
            result[key] = draw(values)
        elif draw(st.integers(0, 9)) == 0:
            result[key] = draw(WRONG[key])
    return result


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_valid_or_refused(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(name))
    try:
        made = Shape(**shape)  # type: ignore[arg-type]
        n = stages_of(name, made)
        pick = st.sampled_from([0.0, 0.5, 1.0, 3.0])
        lists = [tuple(data.draw(pick) for _ in range(n)) for _ in range(4)]
        costs = CostTable(
            forward=lists[0], input_grad=lists[1], weight_grad=lists[2], recompute=lists[3],
            comm=data.draw(st.sampled_from([0.0, 0.25])),
        )  # fmt: skip
        schedule = generate(name, made, costs)
    except ScheduleError as error:
        if not (error.where and error.why and error.fix):
            pytest.fail(f"no clear message: {error.args}")
        return
    verify(schedule, memory_limit=made.memory_limit)
    assert schedule.name == name
    assert schedule.stages == n
    timeline = simulate(schedule, costs)
    close = 1 + 1e-9
    assert lower_bound(schedule, costs) <= timeline.makespan * close
    assert max(timeline.busy) <= period(schedule, costs) * close
    if schedule.versions == "flush":
        assert period(schedule, costs) <= timeline.makespan * close
    for step in (split_backward(schedule), fuse_backward(schedule, everywhere=True)):
        verify(step)
    verify(add_updates(place_gradient_sync(replicate(schedule, 2), "eager-opt", costs)))


def shapes_of(name: str, option: str) -> Iterator[Shape]:
    """Small shapes in which only one option is set."""
    some = {"chunks": (2, 3), "unit": (2, 3), "pipelines": (2, 4), "concat": ("doubling", "halving")}
    some["vocabulary"] = ("split",)
    for devices, count in ((2, 4), (4, 8)):
        for value in some.get(option, (devices - 1, 2 * devices)):
            yield Shape(devices=devices, microbatches=count, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "option"), [(n, o) for n, f in SCHEDULES.items() for o in sorted(f.options)])
def test_an_option_that_a_family_reads_changes_its_schedule(name: str, option: str) -> None:
    changed = set()
    for shape in shapes_of(name, option):
        try:
            made = generate(name, shape)
        except ScheduleError:
            continue
        verify(made, memory_limit=shape.memory_limit)
        plain = generate(name, Shape(devices=shape.devices, microbatches=shape.microbatches))
        changed.add((made.placement, made.orders) != (plain.placement, plain.orders))
    assert True in changed


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_of_the_wrong_length_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="give 1 or"):
        generate(name, Shape(devices=4, microbatches=4), CostTable.even(5))


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match="F of stage 0 is -1"):
        CostTable.even(4, forward=-1)
