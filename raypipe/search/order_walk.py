"""The times of an order's tasks, and a walk along their critical paths that makes it shorter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays, floats, ints
from raypipe.search.problem import DeviceOrders

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOT, COLD = 0.005, 1e-5
"""First and last temperature of a walk, as shares of the order's value."""
AT_ONCE = 1_000_000
"""Tries times tasks before a walk looks at its budget again: some 10 ms."""


class Frame(NamedTuple):
    """How an order is measured: its value is the largest ``last end + due`` of a device.

    All zeros give the makespan. With ``due`` minus each device's first start, the value is the span. With ``release``
    the devices' starts in steady state and ``due`` minus them, it is the period.
    """

    release: Sequence[float]
    """Per device, the earliest start of its first task."""
    due: Sequence[float]
    """Per device, added to its last end."""


class OrderTimes(NamedTuple):
    """When the tasks of an order begin and end if each begins as soon as it can."""

    begin: list[float]
    end: list[float]
    in_turn: list[int]
    """All tasks, none before one that it waits for."""


def times(layout: LaneArrays, orders: DeviceOrders) -> OrderTimes:
    """Time an order that can run."""
    from raypipe.search import order_kernel as kernel

    begin, in_turn = floats([0.0] * len(layout.lane)), layout.lane.copy()
    setting = kernel_order(layout, orders, None)
    value = kernel.timed(*setting, float("inf"), begin, layout.lane.copy(), in_turn, seed_of(random.Random(0)))
    assert value < float("inf"), "an order that cannot run"
    return OrderTimes(begin.tolist(), (begin + layout.flat.time[layout.lane]).tolist(), in_turn.tolist())


def shortened(
    layout: LaneArrays,
    start: DeviceOrders,
    goal: float,
    budget: Budget,
    rng: random.Random,
    tries: int,
    frame: Frame | None = None,
) -> tuple[DeviceOrders, float]:
    """Shorten an order until it reaches ``goal`` or the budget or the tries run out.

    Args:
        layout: the problem.
        start: an order that can run.
        goal: value at which to stop, for example a lower bound.
        budget: budget of the whole search.
        rng: draws the moves.
        tries: largest number of moves that are tried.
        frame: what is minimised; by default the makespan.

    Returns:
        The best order, and its value in ``frame``.
    """
    from raypipe.search import order_kernel as kernel

    setting = kernel_order(layout, start, frame)
    best, value, tried = setting.order.copy(), float("inf"), 0
    seed, most = seed_of(rng), max(1, AT_ONCE // len(layout.lane))
    while tried < tries and value > goal and budget.left > 0:
        now = min(most, tries - tried)
        hot, cold = (HOT * (COLD / HOT) ** (k / tries) for k in (tried, tried + now))
        value = kernel.walk(*setting, best, value, goal, hot, cold, now, seed)
        tried += now
    return layout.orders(best, setting.places), value


def seed_of(rng: random.Random) -> NDArray[Any]:
    """A seed of a kernel's random numbers."""
    import numpy as np

    return np.array([rng.getrandbits(64)], np.uint64)


class _KernelOrder(NamedTuple):
    """The first arguments of the kernels, see ``order_kernel.timed``."""

    flat: Any
    lane: NDArray[Any]
    tail: NDArray[Any]
    order: NDArray[Any]
    places: NDArray[Any]
    release: NDArray[Any]
    due: NDArray[Any]


def kernel_order(layout: LaneArrays, orders: DeviceOrders, frame: Frame | None) -> _KernelOrder:
    """Return an order of tasks as the arrays of the kernel."""
    p = layout.problem
    release, due = frame or ((0.0,) * p.devices,) * 2
    tail = [due[d] for d in p.device]
    for c in reversed(layout.in_turn):
        if p.count[c]:
            tail[c] = max([tail[c], *(lag + p.time[e] + tail[e] for e, lag in p.after[c])])
    tasks, places = ints(t for order in orders for t in order), ints(accumulate(map(len, orders), initial=0))
    return _KernelOrder(layout.flat, layout.lane, floats(tail), tasks, places, floats(release), floats(due))
