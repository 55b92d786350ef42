"""Samples of a corpus are the same whoever fetches them; image tokens fit their images."""

from pathlib import Path

import numpy as np
import pytest
import torch

from raypipe.data import Corpus, declared_fields
from raypipe.data.sample_order import BLOCK, permuted
from raypipe.errors import SpecError
from raypipe.graph.placeholders import Placeholder
from raypipe.job import JobSpec
from raypipe.models import build_model
from raypipe.train import prepare_run
from tests.job_files import minimal_job

SEQUENCE = 4


@pytest.fixture
def corpus():
    """Bytes 0, 1, 2, ...: a window's first token says which window it is."""
    arrays = {"train": np.arange(0, 242, dtype=np.uint8), "val": np.arange(100, 150, dtype=np.uint8)}
    return Corpus({}, arrays, SEQUENCE)


def test_targets_are_the_next_tokens(corpus):
    tokens, targets = corpus.batch("train", seed=0, step=0, batch=8)
    assert tokens.shape == targets.shape == (8, SEQUENCE)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert (tokens[:, 0] % SEQUENCE == 0).all()


@pytest.mark.parametrize("microbatch", [1, 2, 3, 8])
def test_micro_batches_are_slices_of_the_mini_batch(corpus, microbatch):
    for step in (0, 7, 8):  # step 7 ends one epoch of 60 windows and begins the next
        whole = corpus.batch("train", 0, step, 8)
        for first in range(0, 8, microbatch):
            count = min(microbatch, 8 - first)
            part = corpus.samples("train", 0, step, first, count, 8)
            assert all(torch.equal(p, w[first : first + count]) for p, w in zip(part, whole, strict=True))


def test_the_order_does_not_depend_on_the_batch_size(corpus):
    small = torch.cat([corpus.batch("train", 0, step, 2)[0] for step in range(20)])
    large = torch.cat([corpus.batch("train", 0, step, 8)[0] for step in range(5)])
    assert torch.equal(small, large)


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(corpus):
    assert corpus.windows("train") == 60
    epochs = [corpus.batch("train", 0, step, 60)[0][:, 0].tolist() for step in range(3)]
    assert all(sorted(epoch) == list(range(0, 240, SEQUENCE)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_orders_training_but_not_validation(corpus):
    assert not torch.equal(corpus.batch("train", 0, 0, 8)[0], corpus.batch("train", 1, 0, 8)[0])
    assert torch.equal(corpus.batch("val", 0, 0, 8)[0], corpus.batch("val", 1, 0, 8)[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000, BLOCK, 3 * BLOCK + 1])
def test_the_order_is_a_permutation(size):
    image = [permuted(7, size, i) for i in range(size)]
    assert sorted(image) == list(range(size))


def test_the_order_looks_random():
    """Fixed points and rising neighbours as often as in a random permutation: 1, and half of them."""
    size = 10_000
    fixed, rises = [], []
    for key in range(20):
        image = np.array([permuted(key, size, i) for i in range(size)])
        fixed.append((image == np.arange(size)).sum())
        rises.append((np.diff(image) > 0).mean())
    assert 0.2 < np.mean(fixed) < 2.2  # 20 draws of a Poisson of mean 1
    assert np.mean(rises) == pytest.approx(0.5, abs=0.005)


GOLDEN = [740, 619, 136, 551, 644, 102]


def test_the_order_is_the_one_older_checkpoints_were_trained_in():
    assert [permuted(2**63 + 5, 1000, i) for i in range(6)] == GOLDEN


# A row with too few or too many image tokens is one error, before anything starts.

IMAGE = 39


def job_of(path: Path, ids: np.ndarray, ragged: bool = False) -> JobSpec:
    draw = np.random.default_rng(0)
    rows = {"patches": draw.normal(size=(len(ids), 3, 6)), "labels": ids, "input_ids": ids}
    if ragged:
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
        for name in ("labels", "input_ids"):
            rows |= {name: ids.reshape(-1), f"{name}.offsets": offsets}
    np.savez(path / "rows.npz", **rows)
    return minimal_job(
        {"import": "tests.zoo.odd_modules:ImageTokens", "task": "causal-lm"},
        path / "rows.npz",
        {"schedule": "1f1b", "stages": 1, "microbatch": 1},
        batch=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_each_row_has_as_many_image_tokens_as_its_image_has_features(ragged, tmp_path) -> None:
    ids = np.random.default_rng(1).integers(3, 30, (12, 8))
    ids[:, 2:5] = IMAGE
    job = job_of(tmp_path, ids, ragged)
    assert build_model(job, declared_fields(job.data)).placeholders == (Placeholder("input_ids", IMAGE, 3),)
    prepare_run(job, tmp_path / "good", resume=False, say=lambda _: None)
    for column, result in ((5, 4), (2, 2)):
        wrong = ids.copy()
        wrong[7, column] = IMAGE if result == 4 else 3
        words = rf"has {result} times token {IMAGE} in input_ids, and its image has 3 features"
        with pytest.raises(SpecError, match=words):
            prepare_run(job_of(tmp_path, wrong, ragged), tmp_path / f"bad {result}", resume=False, say=lambda _: None)
