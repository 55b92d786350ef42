"""Reverse first-k: Algorithm 2's order, and the memory that caps k."""

import random

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule.families.out_of_order import HeldMemory, most_postponed, reverse_first_k
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
    """What a device holds at each W, by playing the order: a layer's activations and its output's gradient until both
    its dO and its dW have run."""
    order = [t for t in reverse_first_k(len(kept), k).orders[0] if t.kind in ("B", "W")]
    last = len(kept) - 1
    held = {}
    for now, task in enumerate(order):
        if task.kind == "W":
            held[task.stage] = 0.0
            for layer in range(len(kept)):
                own = [n for n, t in enumerate(order) if t.stage == layer]
                made = next((n for n, t in enumerate(order) if (t.kind, t.stage) == ("B", layer + 1)), 0)
                made = 0 if layer == last else made
                held[task.stage] += kept[layer] * (now <= max(own)) + gradients[layer] * (made <= now <= max(own))
    return [held[layer] for layer in range(len(kept))]


def test_memory_caps_k():
    """By playing every k; where the cap stops, the next k would be too much by the same count."""
    rng = random.Random(2)
    for _ in range(50):
        n = rng.randint(1, 9)
        kept, gradients = ([float(rng.randint(1, 9)) for _ in range(n)] for _ in range(2))
        usual = played(kept, gradients, 0)
        waiting = [a + b for a, b in zip(kept, gradients, strict=True)]
        peaks = [max(played(kept, gradients, k)) for k in range(n + 1)]
        cap = rng.choice([*peaks, 0.5 + rng.choice(peaks)])
        apart = [all_ - own for all_, own in zip(usual, waiting, strict=True)]
        memory = HeldMemory(0.0, usual, apart, waiting)
        result = most_postponed(memory, cap)
        assert max(peaks[: result + 1]) <= cap or result == 0
        # With k layers postponed, their own moments come after the backward, when less is left.
        first_above = [usual[i] + sum(waiting[i + 1 : result + 1]) for i in range(min(result + 1, n))]
        assert result == n or max(usual) > cap or max(first_above) > cap
        assert most_postponed(memory, 0.0) == 0
        assert most_postponed(memory, sum(kept) + sum(gradients)) == n
