"""Reverse first-k: Algorithm 2's order, and the memory that caps k."""

import random

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule.families.reverse_first_k import most_postponed, reverse_first_k, temporary_memory
from raypipe.schedule.verify import verify


def backward(schedule):
    return " ".join(str(t) for t in schedule.orders[0] if t.kind in ("B", "W"))


def test_the_order_of_algorithm_2():
    assert backward(reverse_first_k(4, 0)) == "3W0 3B0 2W0 2B0 1W0 1B0 0W0"
    assert backward(reverse_first_k(4, 1)) == backward(reverse_first_k(4, 0))
    assert backward(reverse_first_k(4, 3)) == "3W0 3B0 2B0 1B0 0W0 1W0 2W0"
    assert backward(reverse_first_k(4, 4)) == "3B0 2B0 1B0 0W0 1W0 2W0 3W0"


@pytest.mark.parametrize("layers", [1, 2, 5, 30])
def test_every_sum_is_issued_right_after_its_gradient(layers):
    for k in range(layers + 1):
        schedule = reverse_first_k(layers, k)
        verify(schedule)
        order = schedule.orders[0]
        for n, task in enumerate(order):
            if task.kind == "W":
                assert (order[n + 1].kind, order[n + 1].stage) == ("AR", task.stage)


def test_no_such_k():
    for layers, k in ((4, 5), (4, -1), (0, 0)):
        with pytest.raises(ScheduleError, match="first_k"):
            reverse_first_k(layers, k)


def played(kept, gradients, k):
    """The same by playing the order itself: what each layer holds from when to when."""
    order = [t for t in reverse_first_k(len(kept), k).orders[0] if t.kind in ("B", "W")]
    last = len(kept) - 1
    most = 0.0
    for now in range(len(order)):
        held = 0.0
        for layer in range(len(kept)):
            own = [n for n, t in enumerate(order) if t.stage == layer]
            made = 0 if layer == last else next(n for n, t in enumerate(order) if (t.kind, t.stage) == ("B", layer + 1))
            held += kept[layer] * (now <= max(own)) + gradients[layer] * (made <= now <= max(own))
        most = max(most, held)
    return most


def test_memory_is_that_of_the_order():
    rng = random.Random(2)
    for _ in range(50):
        n = rng.randint(1, 9)
        kept, gradients = ([float(rng.randint(1, 9)) for _ in range(n)] for _ in range(2))
        found = [temporary_memory(kept, gradients, k) for k in range(n + 1)]
        assert found == sorted(found)
        # A dO and a dW of one layer count as one moment, so that the order between the two does not matter.
        for k in range(n + 1):
            assert found[k] >= played(kept, gradients, k)
        cap = rng.choice(found)
        fits = [k for k in range(n + 1) if found[k] <= cap]
        assert most_postponed(kept, gradients, cap) == max(fits)
        assert most_postponed(kept, gradients, 0.0) == 0
