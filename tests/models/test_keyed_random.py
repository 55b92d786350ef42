"""Dropout depends on what is computed, never on who computes it, and is as random as it should be."""

import itertools
import math

import numpy as np
import pytest
import torch

from raypipe.errors import RunError
from raypipe.models.keyed_random import (
    KeyedDropout,
    fold64,
    halves_of_part,
    keyed_dropout,
    random_halves,
    random_keys,
)

SHAPE = (8, 16, 24)


def drop(samples, step=0, seed=0, p=0.3, site=1, x=None):
    x = torch.ones(len(samples), *SHAPE[1:]) if x is None else x
    with random_keys(seed, step, samples, training=True):
        return KeyedDropout(p, site)(x)


def test_a_sample_drops_the_same_in_any_micro_batch():
    whole = drop(range(8))
    parts = torch.cat([drop([0, 1, 2]), drop([3]), drop(torch.tensor([4, 5, 6, 7]))])
    assert torch.equal(whole, parts)
    assert torch.equal(drop([5, 2])[1], whole[2])


def test_global_generators_and_threads_play_no_part():
    before = drop(range(8))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(before, drop(range(8)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("change", [{"step": 1}, {"seed": 1}, {"site": 2}])
def test_each_key_changes_the_mask(change):
    assert not torch.equal(drop(range(8)), drop(range(8), **change))


def test_odd_sizes_and_dtypes_drop_the_same_elements():
    odd = torch.ones(2, 7)
    assert torch.equal(drop([0, 1], x=odd) == 0, drop([0, 1], x=odd.double()) == 0)
    # A longer sample starts with the mask of a shorter one: elements count, not the shape.
    assert torch.equal(drop([0], x=torch.ones(1, 7))[0], drop([0], x=torch.ones(1, 9))[0, :7])


GOLDEN = [32414, 18018, 2872, -12777, 27767, -20790]


def test_the_masks_are_the_ones_older_checkpoints_were_trained_with():
    halves = random_halves([fold64(0, 1, 2)], 6, torch.device("cpu"))
    assert halves[0].tolist() == GOLDEN
    assert random_halves([fold64(0, 1, 2), fold64(3)], 6, torch.device("cpu"))[0].tolist() == GOLDEN


@pytest.mark.parametrize("whole", [(3, 5, 8), (3, 5, 7), (2, 9), (11,)])
def test_a_part_drops_what_the_whole_drops_there(whole):
    """However far a sample is padded: also where rows begin with the second element of a pair."""
    keys, device = [fold64(1), fold64(2)], torch.device("cpu")
    halves = random_halves(keys, math.prod(whole), device).reshape(2, *whole)
    for part in itertools.product(*(range(1, size + 1) for size in whole)):
        first = halves[(slice(None), *(slice(size) for size in part))]
        assert torch.equal(halves_of_part(keys, part, whole, device), first)


def test_a_shorter_sample_drops_the_first_part_of_the_longest():
    x = torch.ones(3, 2, 6, 9)  # attention weights: samples, heads, queries, keys
    with random_keys(0, 0, range(3), training=True):
        mask = keyed_dropout(x, 0.3, 1, 0, None, (1, 2, 6, 9))
        assert torch.equal(mask, keyed_dropout(x, 0.3, 1))
        assert torch.equal(keyed_dropout(x[:, :, :4, :5], 0.3, 1, 0, None, (1, 2, 6, 9)), mask[:, :, :4, :5])
        moved = keyed_dropout(x[:, :, :4, :5].movedim(0, 2), 0.3, 1, 2, None, (2, 6, 1, 9))
        assert torch.equal(moved.movedim(2, 0), mask[:, :, :4, :5])
        shared = keyed_dropout(x[0], 0.3, 1, None, None, (2, 6, 9))
        assert torch.equal(keyed_dropout(x[0, :, :4, :5], 0.3, 1, None, None, (2, 6, 9)), shared[:, :4, :5])


def test_gradient_goes_through_the_same_mask_and_the_mean_stays():
    x = torch.ones(4, 1000, requires_grad=True)
    y = drop(range(4), p=0.25, x=x)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert y.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert y.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_p(p):
    zeros = (drop(range(64), p=p, x=torch.ones(64, 16384)) == 0).double()
    z = (float(zeros.mean()) - p) / np.sqrt(p * (1 - p) / zeros.numel())
    assert abs(z) < 5  # the rounding of p to 1/65536 is well below one standard deviation here


def test_masks_of_samples_sites_and_neighbours_are_uncorrelated():
    """Correlations between 100 masks of 65536 elements: z-scores spread like a standard normal's."""
    for keys in ([fold64(fold64(0, s), 7) for s in range(100)], [fold64(fold64(0, 3), s) for s in range(100)]):
        halves = random_halves(keys, 1 << 16, torch.device("cpu")).numpy()
        kept = (halves >= -26214).astype(np.float32)
        normal = (kept - kept.mean(1, keepdims=True)) / kept.std(1, keepdims=True)
        pairs = (normal @ normal.T / np.sqrt(kept.shape[1]))[np.triu_indices(100, 1)]
        assert abs(pairs).max() < 5.5
        assert pairs.std() == pytest.approx(1, abs=0.05)
        for lag in (1, 2, 3, 64, 128, 4096):
            z = (normal[:, :-lag] * normal[:, lag:]).sum() / np.sqrt(normal[:, lag:].size)
            assert abs(z) < 5


def test_hashes_are_uniform():
    halves = random_halves([fold64(5)], 1 << 20, torch.device("cpu")).numpy()[0]
    counts = np.bincount((halves.astype(int) + 32768) >> 6, minlength=1024)
    expected = halves.size / 1024
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - 1023) / np.sqrt(2 * 1023) < 5


def test_identity_when_nothing_is_to_be_dropped():
    x = torch.ones(2, 3)
    layer = KeyedDropout(0.5, 0)
    with random_keys(0, 0, [0, 1], training=False):
        assert layer(x) is x
    assert KeyedDropout(0.0, 0)(x) is x
    assert layer.eval()(x) is x


def test_contexts_nest_and_end():
    x = torch.ones(1, 64)
    layer = KeyedDropout(0.5, 0)
    with random_keys(0, 0, [0], training=True):
        first = layer(x)
        with random_keys(0, 1, [0], training=True):
            assert not torch.equal(layer(x), first)
        assert torch.equal(layer(x), first)
        with random_keys(0, 0, [], training=False):
            assert layer(x) is x
    with pytest.raises(RunError, match="no random keys"):
        layer(x)


def test_a_wrong_number_of_samples_is_an_error():
    with random_keys(0, 0, [0, 1], training=True), pytest.raises(RunError, match="3 rows for 2 samples"):
        KeyedDropout(0.5, 0)(torch.ones(3, 4))


@pytest.mark.gpu
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_drops_the_same_elements():
    x = torch.ones(SHAPE)
    assert torch.equal(drop(range(8), x=x), drop(range(8), x=x.cuda()).cpu())
