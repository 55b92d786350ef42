"""The order of a priority queue, against one that is run second by second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raypipe.runtime.update.buckets import prioritised_order

TIMES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=8)


def served(ready: list[int], seconds: list[int]) -> list[int]:
    """What a link does that looks at its queue in every second in which it is free."""
    order: list[int] = []
    busy_until = 0
    for now in range(200):
        waiting = [piece for piece, at in enumerate(ready) if at <= now and piece not in order]
        if waiting and now >= busy_until:
            order.append(waiting[0])
            busy_until = now + seconds[waiting[0]]
    return order


@given(TIMES)
def test_order_is_that_of_a_queue(pieces) -> None:
    ready, seconds = [a for a, _ in pieces], [b for _, b in pieces]
    assert prioritised_order([float(a) for a in ready], [float(b) for b in seconds]) == served(ready, seconds)


def test_a_fast_link_takes_them_as_they_come_and_a_slow_one_the_first_layers_before_the_rest() -> None:
    ready = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert prioritised_order(ready, [0.1] * 6) == [5, 4, 3, 2, 1, 0]
    assert prioritised_order(ready, [100.0] * 6) == [5, 0, 1, 2, 3, 4]
