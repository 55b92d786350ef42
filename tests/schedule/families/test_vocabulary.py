"""1F1B with the head's rows on every device: what waits for what, memory, and how near it is to even devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.families.vocabulary import costs_of, graph_of
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate


def split(devices: int, microbatches: int, costs: CostTable | None = None) -> Schedule:
    made = generate("1f1b", Shape(devices=devices, microbatches=microbatches, vocabulary="split"), costs)
    verify(made)
    return made


def test_every_device_waits_once_for_all_shares() -> None:
    """A share's forward waits for the last block, the loss for all shares, a share's backward for the loss alone."""
    graph = link(split(4, 6))
    needs = {task: {graph.tasks[p] for p in graph.preds[i]} for i, task in enumerate(graph.tasks)}
    for share in range(4, 8):
        assert needs[Task("F", share, (2,))] == {Task("F", 3, (2,))}
        assert needs[Task("B", share, (2,))] == {Task("F", share, (2,)), Task("B", 8, (2,))}
        assert needs[Task("W", share, (2,))] == {Task("B", share, (2,))}
    assert needs[Task("F", 8, (2,))] == {Task("F", share, (2,)) for share in range(4, 8)}
    assert needs[Task("BW", 3, (2,))] == {Task("F", 3, (2,)), *(Task("B", share, (2,)) for share in range(4, 8))}


@pytest.mark.parametrize("head", [0.5, 2.0, 8.0])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 8), (4, 16), (8, 32), (8, 4)])
def test_one_activation_more_than_1f1b_and_shorter_than_its_even_step(
    head: float, devices: int, microbatches: int
) -> None:
    costs = costs_of((1.0,) * devices, head)
    schedule = split(devices, microbatches, costs)
    blocks = [[t for t in order if t.stage < devices] for order in schedule.orders]
    shares = [[t for t in order if devices <= t.stage < 2 * devices] for order in schedule.orders]
    for device, order in enumerate(blocks):
        assert held(order, "BW") <= min(devices - device + 1, microbatches)
    assert max(held(order, "W") for order in shares) <= devices
    # What 1F1B takes where each device had the same share of the same work: a closed form.
    work = sum(sum(getattr(costs, name)) for name in ("forward", "input_grad", "weight_grad")) / devices
    even = (microbatches + devices - 1) * work
    assert simulate(schedule, costs).makespan <= even / 0.85


def held(order: list[Task], last: str) -> int:
    """The most forwards of a device whose last task has not come yet."""
    alive = most = 0
    for task in order:
        alive += (task.kind == "F") - (task.kind == last)
        most = max(most, alive)
    return most


def test_a_whole_head_is_slower_the_larger_it_is() -> None:
    devices, microbatches, head = 8, 32, 2.0
    uneven = CostTable.even(devices)
    last = (*uneven.forward[:-1], 1.0 + head)
    whole = replace(uneven, forward=last, input_grad=last, weight_grad=last)
    slow = simulate(generate("1f1b", Shape(devices=devices, microbatches=microbatches)), whole).makespan
    costs = costs_of((1.0,) * devices, head)
    assert simulate(split(devices, microbatches, costs), costs).makespan < slow / 1.8


def test_it_is_refused_where_there_is_nothing_to_divide_with() -> None:
    with pytest.raises(ScheduleError, match="one device"):
        split(1, 4)
    with pytest.raises(ScheduleError, match="no order for 2 slices"):
        generate("1f1b", Shape(devices=2, microbatches=4, slices=2, vocabulary="split"))
    with pytest.raises(ScheduleError, match="gpipe has no use for vocabulary = split"):
        generate("gpipe", Shape(devices=2, microbatches=4, vocabulary="split"))
    assert graph_of(2).stages == 5
