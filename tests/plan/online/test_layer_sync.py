"""Data parallelism layer by layer: the four ways to synchronise, by hand, and the paper's claims."""

import random

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.online.tune_first_k import layer_step_time, tune_first_k
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.out_of_order import reverse_first_k
from tests.exhaustive import exhaustive


def table(forward, sums, backward=None):
    back = tuple(backward or forward)
    return CostTable(
        forward=tuple(forward), input_grad=back, weight_grad=back, recompute=(0.0,) * len(back),
        all_reduce=tuple(sums), update=(0.0,) * len(back),
    )  # fmt: skip


def usual(costs, sync):
    return layer_step_time(reverse_first_k(costs.stages, 0), costs, sync)


def postponed(costs, k):
    return layer_step_time(reverse_first_k(costs.stages, k), costs, "prioritised")


def test_two_layers_by_hand():
    """F0 F1 W1 B1 W0 take 1 each, in step 1 from 0 to 5; the sum of layer 1 takes 5, that of layer 0 takes 2.

    Lazy: layer 1 from 5 to 10, layer 0 to 12, when F0 may start. Wait-free: layer 1 from 3 to 8, layer 0 to 10. With
    priorities, layer 0 cuts in at 5 and is done at 7, so steps are shorter, but no shorter than the link needs: 7.
    """
    costs = table([1.0, 1.0], [2.0, 5.0])
    assert usual(costs, "lazy") == pytest.approx(12.0)
    assert usual(costs, "wait-free") == pytest.approx(10.0)
    assert 7.0 <= usual(costs, "prioritised") < 10.0


def test_sums_of_no_time_leave_the_compute():
    costs = table([1.0, 2.0, 3.0], [0.0] * 3)
    for sync in ("lazy", "wait-free", "prioritised"):
        assert usual(costs, sync) == pytest.approx(3 * 6.0 - 1.0)  # the first layer has no input gradient


@pytest.mark.slow
@pytest.mark.parametrize("cases", [8, *exhaustive(60)])
def test_never_shorter_than_compute_or_link_and_prioritised_between(cases):
    rng = random.Random(8)
    for _ in range(cases):
        n = rng.randint(2, 30)
        forward = [rng.lognormvariate(0, 0.7) for _ in range(n)]
        sums = [rng.lognormvariate(0, 1.2) for _ in range(n)]
        costs = table(forward, sums)
        least = max(3 * sum(forward) - forward[0], sum(sums))
        lazy, free, first = (usual(costs, sync) for sync in ("lazy", "wait-free", "prioritised"))
        assert least - 1e-9 <= first <= free + 1e-9 <= lazy + 2e-9
        assert lazy <= 3 * sum(forward) - forward[0] + sum(sums) + 1e-9


def test_the_papers_case():
    """Section 7.3: 380 ms of compute, and 350 ms of synchronisation of the first layer, of a ResNet-50."""
    costs = table([380 / 3 / 54] * 54, [350.0] + [0.5] * 53)
    best = tune_first_k(lambda k: postponed(costs, k), 54)
    for sync in ("lazy", "wait-free", "prioritised"):
        assert usual(costs, sync) / best.seconds >= 1.2


def resnet_50():
    """Sixteen workers: time goes with the size of the images, parameters with the channels, so late layers have most.

    Per stage of the network: blocks of three convolutions; compute falls slowly while parameters rise fourfold.
    """
    forward, parameters = [6.0], [9.4e3]
    for width, blocks, time in ((64, 3, 1.6), (128, 4, 1.5), (256, 6, 1.45), (512, 3, 1.45)):
        for _ in range(blocks):
            forward += [time * share for share in (0.27, 0.46, 0.27)]
            parameters += [4 * width * width, 9 * width * width, 4 * width * width]
    return [*forward, 0.2], [*parameters, 2.05e6]


@pytest.mark.parametrize("share", [0.8, 1.0, 1.2])
def test_prioritised_and_reverse_first_k_beat_lazy_and_wait_free(share):
    forward, parameters = resnet_50()
    whole = 3 * sum(forward) * share / sum(parameters)
    costs = table(forward, [p * whole for p in parameters])
    first = usual(costs, "prioritised")
    best = tune_first_k(lambda k: postponed(costs, k), costs.stages)
    assert best.seconds <= first < usual(costs, "wait-free") < usual(costs, "lazy")


@pytest.mark.slow
def test_tuned_k_on_thirty_profiles():
    """Within 2 % of the best of all k, slower than wait-free on none, in about a quarter of the trials."""
    rng = random.Random(3)
    tries = every = 0
    for _ in range(30):
        n = rng.randint(8, 60)
        forward = [rng.lognormvariate(0, 0.7) for _ in range(n)]
        sums = [rng.lognormvariate(0, 1.2) for _ in range(n)]
        scale = sum(forward) * rng.uniform(0.2, 3) / sum(sums)
        costs = table(forward, [s * scale for s in sums], [x * rng.uniform(0.8, 1.2) for x in forward])
        seconds = {k: postponed(costs, k) for k in range(n + 1)}
        result = tune_first_k(seconds.__getitem__, n)
        tries, every = tries + len(result.tried), every + n + 1
        assert result.seconds <= 1.02 * min(seconds.values())
        assert result.seconds <= usual(costs, "wait-free") * (1 + 1e-9)
    assert tries < every / 2


def test_k_goes_back_to_0_where_it_does_not_pay():
    assert tune_first_k(lambda k: 1.0 + k, 20).k == 0
    assert tune_first_k(lambda k: 1.0 - 0.001 * k, 20, gain=0.05).k == 0
    assert tune_first_k(lambda k: 1.0 - 0.01 * k, 20, gain=0.05).k == 20
    assert tune_first_k(lambda k: 1.0, 0).tried == {0: 1.0}


def test_refused():
    costs = table([1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ScheduleError, match="one data-parallel copy"):
        layer_step_time(generate("1f1b", Shape(devices=2, microbatches=1)), costs, "lazy")
    with pytest.raises(ScheduleError, match="unknown"):
        usual(costs, "eager")
