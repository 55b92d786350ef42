"""Causal attention of slices against that of whole sequences: results and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raypipe.models import slice_attention
from raypipe.models.current_slice import SliceRun, current_slice, own_chunks, positions_of, slice_run
from raypipe.models.keyed_operations import Site, keyed_attention
from raypipe.models.keyed_random import keyed_dropout, random_keys
from raypipe.models.slice_attention import Dropped, causal_attention
from tests.experts.threads import Member
from tests.tensor.threads import run_members


def tensors(heads: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 24, 8, dtype=torch.float64, generator=generator) for n in (heads, keys, keys, heads)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("heads", "keys", "scale"), [(4, 4, None), (4, 2, 0.2)])
@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_slices_add_up_to_the_whole(fused, heads, keys, scale, slices, monkeypatch) -> None:
    if not fused:  # as on devices without a kernel that gives the log-sum-exp
        monkeypatch.setattr(slice_attention, "_fused", lambda *_: False)
    *inputs, gradient = tensors(heads, keys)
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, scale=scale, enable_gqa=heads != keys)
    expected.backward(gradient)
    pieces, parts, made = [], [], []
    for i in range(slices):
        own = [x.chunk(slices, 2)[i].clone().requires_grad_() for x in inputs]
        with slice_run(SliceRun(i, slices, pieces)):
            made.append(causal_attention(*own, scale, heads != keys))
        parts.append(own)
    assert torch.allclose(torch.cat(made, 2), expected, rtol=0, atol=1e-13)
    for i in reversed(range(slices)):
        made[i].backward(gradient.chunk(slices, 2)[i])
    for k, x in enumerate(whole):
        assert torch.allclose(torch.cat([own[k].grad for own in parts], 2), x.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("heads", "keys", "scale"), [(4, 4, None), (4, 2, 0.2)])
@pytest.mark.parametrize("slices", [1, 3, 8])
def test_slices_drop_what_the_whole_drops(heads, keys, scale, slices) -> None:
    """Weights by (sample, query position, key position); the backward draws them again, outside of any context."""
    *inputs, gradient = tensors(heads, keys)
    site = Site(3, 0, None, (1, heads, 24, 24))
    whole = [x.clone().requires_grad_() for x in inputs]
    with random_keys(1, 2, [4, 7], True):
        expected = keyed_attention(*whole, None, 0.3, True, scale=scale, enable_gqa=heads != keys, site=site)
    expected.backward(gradient)
    pieces, parts, made = [], [], []
    for i in range(slices):
        own = [x.chunk(slices, 2)[i].clone().requires_grad_() for x in inputs]
        with random_keys(1, 2, [4, 7], True), slice_run(SliceRun(i, slices, pieces)):
            made.append(causal_attention(*own, scale, heads != keys, Dropped(0.3, site)))
        parts.append(own)
    assert torch.allclose(torch.cat(made, 2), expected, rtol=0, atol=1e-13)
    plain = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=heads != keys)
    assert not torch.allclose(expected, plain, atol=1e-3)
    for i in reversed(range(slices)):
        made[i].backward(gradient.chunk(slices, 2)[i])
    for k, x in enumerate(whole):
        assert torch.allclose(torch.cat([own[k].grad for own in parts], 2), x.grad, rtol=0, atol=1e-13)


def test_slices_drop_nothing_in_evaluation() -> None:
    query, key, value, _ = tensors(4, 4)
    with random_keys(1, 2, [4, 7], False), slice_run(SliceRun(0, 1, [])):
        result = causal_attention(query, key, value, dropped=Dropped(0.3, Site(3, 0, None, (1, 4, 24, 24))))
    assert torch.allclose(result, F.scaled_dot_product_attention(query, key, value, is_causal=True), atol=1e-13)


def test_whole_sequences_run_in_torchs_kernel() -> None:
    query, key, value, _ = tensors(4, 4)
    assert current_slice() is None
    assert torch.equal(
        causal_attention(query, key, value), F.scaled_dot_product_attention(query, key, value, is_causal=True)
    )


class Copy(Member):
    """One of the copies that divide sequences."""

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.meeting.exchange(self.rank, x)


def held(x: torch.Tensor, rank: int, copies: int) -> torch.Tensor:
    parts = x.chunk(2 * copies, 2)
    return torch.cat([parts[n] for n in own_chunks(rank, copies)], 2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("heads", "keys", "scale"), [(4, 4, None), (4, 2, 0.2)])
@pytest.mark.parametrize("copies", [2, 3, 4])
def test_copies_that_divide_sequences_add_up_to_the_whole(copies, heads, keys, scale, dropout) -> None:
    """Results, gradients, and what is dropped of weights and of values by position."""
    *inputs, gradient = tensors(heads, keys)
    site = Site(3, 0, None, (1, heads, 24, 24))

    def attention(*own: torch.Tensor) -> torch.Tensor:
        with random_keys(1, 2, [4, 7], True):
            dropped = keyed_dropout(own[0], 0.2, 5, sequence_dim=2)
            grouped = heads != keys
            return keyed_attention(dropped, *own[1:], None, dropout, True, scale=scale, enable_gqa=grouped, site=site)

    whole = [x.clone().requires_grad_() for x in inputs]
    expected = attention(*whole)
    expected.backward(gradient)

    def work(rank: int, _: Copy) -> list[torch.Tensor]:
        own = [held(x, rank, copies).requires_grad_() for x in inputs]
        made = attention(*own)
        made.backward(held(gradient, rank, copies))
        places = positions_of(24 // copies)
        assert torch.equal(places, held(torch.arange(24).view(1, 1, 24), rank, copies).flatten())
        return [made.detach(), *(x.grad for x in own if x.grad is not None)]

    for rank, found in enumerate(run_members(copies, Copy, "context", work)):
        for mine, theirs in zip(found, [expected.detach(), *(x.grad for x in whole)], strict=True):
            assert torch.allclose(mine, held(theirs, rank, copies), rtol=0, atol=1e-13)
