"""What the verifier says: each fault names the task, marks it in the grid and says what to do."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.passes import add_updates, place_gradient_sync
from raypipe.schedule.verify import verify


@pytest.fixture
def good() -> Schedule:
    return generate("1f1b", Shape(devices=2, microbatches=2))


def swap(schedule: Schedule, device: int, a: int, b: int) -> Schedule:
    orders = [list(o) for o in schedule.orders]
    orders[device][a], orders[device][b] = orders[device][b], orders[device][a]
    return schedule.with_orders(orders)


def test_a_backward_before_its_forward(good: Schedule) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(swap(good, 0, 0, 2))
    assert str(caught.value) == (
        "device 0, position 0, task 0BW0: can never run, the devices wait in a circle: 0BW0 waits for 0F0\n"
        "device 0: >0BW0< 0F1  0F0 0BW1   <-- here\n"
        "device 1: 1F0    1BW0 1F1 1BW1\n"
        "  fix: reorder one of these tasks"
    )


def test_a_task_on_the_wrong_device(good: Schedule) -> None:
    orders = [good.orders[0] + good.orders[1][3:], good.orders[1][:3]]
    with pytest.raises(ScheduleError, match="stage 1 of replica 0 is on device 1"):
        verify(good.with_orders(orders))


def test_an_incomplete_step_names_what_is_missing(good: Schedule) -> None:
    with pytest.raises(ScheduleError, match="no device runs 0W1"):
        verify(good.with_orders([[*good.orders[0][:3], Task("B", 0, (1,))], good.orders[1]]))
    with pytest.raises(ScheduleError, match="no device runs 0F1"):
        verify(good.with_orders([[], []], placement=((0, 1),), microbatches=2).with_orders([[good.orders[0][0]], []]))


def test_budgets(good: Schedule) -> None:
    with pytest.raises(ScheduleError, match="holds 2 activations, the limit is 1") as caught:
        verify(good, memory_limit=1)
    assert ">0F1<" in str(caught.value)


def test_all_reduce_and_update_in_their_places(good: Schedule) -> None:
    pair = add_updates(place_gradient_sync(generate("chimera", Shape(devices=2, microbatches=2)), "lazy"))
    verify(pair)
    last = len(pair.orders[0]) - 1
    with pytest.raises(ScheduleError, match="0U: comes before 0AR"):
        verify(
            pair.with_orders(
                [[pair.orders[0][last - 1], *pair.orders[0][: last - 1], pair.orders[0][last]], pair.orders[1]]
            )
        )
    without = [[t for t in pair.orders[0] if t.kind != "AR"], pair.orders[1]]
    with pytest.raises(ScheduleError, match="replica 1 has no AR of stage 1"):
        verify(pair.with_orders(without))


def test_placement_of_the_wrong_length(good: Schedule) -> None:
    with pytest.raises(ScheduleError, match="1 devices for 2 stages"):
        verify(good.with_orders(good.orders, placement=((0,),)))
    with pytest.raises(ScheduleError, match="device 5, which does not exist"):
        verify(good.with_orders(good.orders, placement=((0, 5),)))


@pytest.mark.parametrize(("edges", "why"), [("0>1 0>1", "0>1 is given twice"), ("0>9", "0>9 does not join two stages")])
def test_edges_that_are_none_or_doubled(edges: str, why: str) -> None:
    """Of the text form, whose reader knows the number of stages only when all is read."""
    with pytest.raises(ScheduleError, match=why):
        verify(from_text(f"edges {edges}\ndevice 0: 0F0 0BW0\ndevice 1: 1F0 1BW0\n"))


def test_large_grids_are_cut() -> None:
    big = generate("1f1b", Shape(devices=40, microbatches=80))
    with pytest.raises(ScheduleError) as caught:
        verify(big, memory_limit=30)
    lines = str(caught.value).splitlines()
    assert len(lines) < 24
    assert all(len(line) < 140 for line in lines)


@pytest.mark.parametrize(
    ("orders", "why"),
    [
        ("device 0: 0F0|0BW0 0F1 0BW1", "runs together with 0F0, and needs it"),
        ("device 0: 0F0 0F1 0BW0|0BW1", "a pair is a forward with a B or BW right after it"),
        ("device 0: 0F0|0F1 0BW0 0BW1", "a pair is a forward with a B or BW right after it"),
        ("device 0: |0F0 0F1 0BW0 0BW1", "a pair is a forward with a B or BW right after it"),
    ],
)
def test_what_is_no_pair(orders: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        verify(from_text(orders))


def test_halves_that_need_each_other_through_another_device() -> None:
    """1BW0 needs 1F0, which needs 0F0; 0F0 is held back until 0BW0 of the other half can start, which needs 1BW0."""
    text = "device 0: 0F1 0F0|0BW1 0BW0\ndevice 1: 1F0 1F1 1BW1 1BW0\n"
    with pytest.raises(ScheduleError, match="0BW1 waits for 1BW1") as caught:
        verify(from_text(text))
    assert "|0BW1" in str(caught.value)
    verify(from_text(text).unpaired())
