"""What devices can have done while a pipeline fills, against flow shops in which every layer has its own device."""

from __future__ import annotations

import random

import pytest

from raypipe.plan.certificate.closed import MOMENTS, idle_while_filling


def done_by(moment: float, forward: list[float], order: list[list[int]]) -> float:
    """Seconds of forwards done by a moment; ``order``: of micro-batches, per layer."""
    ended = dict.fromkeys(order[0], 0.0)
    total = 0.0
    for seconds, row in zip(forward, order, strict=True):
        free = 0.0
        for m in row:
            start = max(free, ended[m])
            free = ended[m] = start + seconds
            total += min(seconds, max(0.0, moment - start))
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_flow_shop_does_more(seed) -> None:
    rng = random.Random(seed)
    layers, count = rng.randint(1, 12), rng.randint(1, 8)
    forward = [rng.choice((0.0, 0.1, 1.0, rng.uniform(1, 2), 4.0)) for _ in range(layers)]
    ids = list(range(count))
    orders = [[ids] * layers, [rng.sample(ids, count) for _ in range(layers)]]
    moments = [sum(forward) * k / (MOMENTS - 1) for k in range(MOMENTS)]
    for devices, idle in enumerate(idle_while_filling(forward, count, layers), 1):
        for order in orders:
            assert max(devices * u - done_by(u, forward, order) for u in moments) >= idle - 1e-9


def test_even_layers_cost_what_is_before_each_device() -> None:
    assert idle_while_filling([1.0] * 8, 16, 4) == pytest.approx([0, 1, 1 + 2, 1 + 2 + 3], rel=0.02)


def test_a_slow_first_layer_holds_all_others_up() -> None:
    # By 5 s the four layers can have done 5, 2, 1 and 1 s of forwards. The second and the third device begin after 2
    # and 3 s at the earliest, which alone would be 5 s for three.
    forward = [2.0, 1.0, 1.0, 1.0]
    assert idle_while_filling(forward, 16, 3)[2] == pytest.approx(3 * 5 - 9)
    assert idle_while_filling(forward, 1, 2) == pytest.approx([0.0, 5.0])  # one micro-batch, one device at work
