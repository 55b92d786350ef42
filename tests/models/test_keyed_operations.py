"""Draws depend on seed, step, sample and place alone, have the right distribution, and are their mean in evaluation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from raypipe.models import keyed_operations, random_keys
from raypipe.models.keyed_operations import KEYED, Site, keyed_uniform

aten = torch.ops.aten
COUNT = 40_000


def uniform(samples: list[int], shape: tuple[int, ...], site: int = 0, step: int = 1, **layout: object) -> Tensor:
    with random_keys(3, step, samples, training=True):
        return keyed_uniform((len(samples), *shape), site, **layout)  # type: ignore[arg-type]


def test_a_sample_draws_the_same_in_any_micro_batch() -> None:
    together = uniform([4, 5, 6], (7, 3))
    assert torch.equal(together[1:], uniform([5, 6], (7, 3)))
    assert torch.equal(together[:1], uniform([4], (7, 3)))


def test_a_shorter_sample_draws_the_beginning_of_the_longest() -> None:
    longest = uniform([1, 2], (9, 4))
    assert torch.equal(uniform([1, 2], (5, 4), longest=(1, 9, 4)), longest[:, :5])


def test_samples_in_another_dimension() -> None:
    with random_keys(3, 1, [4, 5], training=True):
        second = keyed_uniform((7, 2, 3), 0, 1, None, (7, 1, 3))
    assert torch.equal(second.movedim(1, 0), uniform([4, 5], (7, 3)))


def test_places_steps_and_samples_draw_differently() -> None:
    drawn = [uniform([1], (50,)), uniform([2], (50,)), uniform([1], (50,), site=1), uniform([1], (50,), step=2)]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert not (one == other).any()


def test_uniform_numbers_are_uniform() -> None:
    result = uniform([0], (COUNT,)).flatten().sort().values
    expected = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    assert (result - expected).abs().max() < 1.63 / math.sqrt(COUNT)  # Kolmogorov-Smirnov, 1 %
    assert result[0] > 0
    assert result[-1] < 1


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda p, x: KEYED[aten.randn_like.default](p, x), 0.0, 1.0),
        (lambda p, x: KEYED[aten.normal_functional.default](p, x, 2.0, 3.0), 2.0, 3.0),
        (lambda p, x: KEYED[aten.rand_like.default](p, x), 0.5, math.sqrt(1 / 12)),
        (lambda p, x: KEYED[aten.uniform.default](p, x, -1.0, 3.0), 1.0, math.sqrt(16 / 12)),
        (lambda p, x: KEYED[aten.exponential.default](p, x, 2.0), 0.5, 0.5),
        (lambda p, x: KEYED[aten.bernoulli.p](p, x, 0.3), 0.3, math.sqrt(0.21)),
        (lambda p, x: KEYED[aten.randint.low](p, 2, 6, x.shape, dtype=torch.float64), 3.5, math.sqrt(15 / 12)),
        (lambda p, x: keyed_operations.alpha_dropout(p, torch.randn_like(x), 0.2, False), 0.0, 1.0),
        (lambda p, x: keyed_operations.feature_dropout(p, torch.ones(1, COUNT, 2), 0.2)[..., 0], 1.0, 0.5),
    ],
    ids=["randn", "normal", "rand", "uniform", "exponential", "bernoulli", "randint", "alpha", "channels"],
)
def test_moments(draw, mean: float, deviation: float) -> None:
    torch.manual_seed(0)
    x = torch.zeros(1, COUNT, dtype=torch.float64)
    with random_keys(3, 1, [0], training=True):
        result = draw(Site(0, 0), x)
    assert float(result.mean()) == pytest.approx(mean, abs=5 * deviation / math.sqrt(COUNT))
    assert float(result.std()) == pytest.approx(deviation, rel=0.03)


def test_a_draw_is_its_mean_in_evaluation() -> None:
    x = torch.randn(2, 5)
    place = Site(0, 0)
    with random_keys(3, 0, [0, 1], training=False):
        kept = KEYED[aten.bernoulli.p](place, torch.empty(2, 1), 0.7).div_(0.7)
        assert torch.equal(x * kept, x)  # stochastic depth is the identity
        assert torch.equal(keyed_operations.alpha_dropout(place, x, 0.3, False), x)
        assert torch.equal(keyed_operations.feature_dropout(place, x, 0.3), x)
        assert not KEYED[aten.randn_like.default](place, x).any()
        torch.testing.assert_close(keyed_operations.rrelu(place, x, 0.1, 0.3, True), torch.rrelu(x, 0.1, 0.3, False))
        floor = keyed_operations.keep_mask(0.7 + KEYED[aten.rand.default](place, [2, 1]), 0.7)
        torch.testing.assert_close(x.div(0.7) * floor, x)


def test_single_precision_numbers_stay_below_one() -> None:
    with random_keys(3, 1, [0], training=True):
        result = KEYED[aten.rand.default](Site(0, 0), [1, COUNT], dtype=torch.float32)
    assert result.dtype == torch.float32
    assert float(result.max()) < 1
    assert torch.equal(result * 2**24, (result * 2**24).floor())
