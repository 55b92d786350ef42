"""Causal attention of slices against that of whole sequences: results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypipe.compat import attention
from raypipe.models.attention import Dropped, causal_attention, share_heads
from raypipe.models.current_slice import SliceRun, current_slice, own_chunks, positions_of, slice_run
from raypipe.models.keyed_operations import Site, keyed_attention
from raypipe.models.keyed_random import keyed_dropout, random_keys
from tests.experts.threads import Member
from tests.models.slices.cuda_kernels import CudaKernels
from tests.tensor.threads import run_members


def tensors(heads: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 24, 8, dtype=torch.float64, generator=generator) for n in (heads, keys, keys, heads)]


@pytest.fixture
def with_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention run in a kernel for GPUs, or, without one, by its scores."""
    if request.param != "cpu":
        monkeypatch.setattr(attention, "fused_kernel", lambda *_: request.param)
        monkeypatch.setattr(attention, "aten", CudaKernels())


KERNELS = pytest.mark.parametrize("with_kernel", ["cpu", "flash", "efficient", None], indirect=True)


@KERNELS
@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize(("heads", "keys", "scale"), [(4, 4, None), (4, 2, 0.2)])
@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_slices_add_up_to_the_whole(heads, keys, scale, slices) -> None:
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


class Sizes(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operator returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [x.numel() * x.element_size() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *found])
        return result


@pytest.mark.parametrize(("kernel", "largest"), [("flash", 1), ("efficient", 1), (None, 32)])
def test_kernels_for_gpus_make_neither_scores_nor_more_heads(kernel, largest, monkeypatch) -> None:
    """torch's own functions of shapes and arguments, on the meta device: nothing is larger than a slice's queries."""
    monkeypatch.setattr(attention, "fused_kernel", lambda *_: kernel)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # knows no such device
    pieces, made = [], []
    with Sizes() as sizes:
        for i in range(4):
            own = [
                torch.empty(2, n, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (8, 2, 2)
            ]
            with slice_run(SliceRun(i, 4, pieces)):
                made.append((causal_attention(*own, None, True), own))
        for total, own in reversed(made):
            total.backward(torch.empty_like(total))
            assert [x.grad.shape for x in own] == [x.shape for x in own]
    assert sizes.largest == largest * 2 * 8 * 1024 * 64 * 2


@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 8)])
@pytest.mark.parametrize("cast", [False, True])
def test_whole_sequences_on_gpus_share_heads_in_half_precision_alone(dtype, heads, cast, monkeypatch) -> None:
    """In float32, or under autocast to it, no fused kernel takes fewer heads of keys than of queries."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("query", "key", "value")]
    attend = torch.ops.aten.scaled_dot_product_attention.default
    graph.output(graph.call_function(attend, tuple(inputs), {"is_causal": True, "enable_gqa": True}))
    module = fx.GraphModule(torch.nn.Module(), graph)
    share_heads(module)
    given: list[tuple[int, int, bool]] = []

    def attention_of(query, key, value, **how):
        given.append((key.shape[1], value.shape[1], how["enable_gqa"]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_of)
    if cast:
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: dtype)
    with FakeTensorMode():
        made = torch.float64 if cast else dtype
        module(*(torch.empty(1, n, 64, 16, device="cuda", dtype=made) for n in (8, 2, 2)))
    assert given == [(heads, heads, heads == 2)]


def test_torch_says_which_kernel_takes_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention first, which lets heads of queries share one of keys; then the other with as many of both."""
    asked: list[tuple[str, int, bool, bool]] = []

    def kernel(heads: int, width: int, *takes: str) -> str | None:
        def answer(name: str) -> Any:
            def can_use(params: Any) -> bool:
                asked.append((name, params.key.shape[1], params.is_causal, params.enable_gqa))
                return name in takes

            return can_use

        asked.clear()
        monkeypatch.setattr(attention, "can_use_flash_attention", answer("flash"))
        monkeypatch.setattr(attention, "can_use_efficient_attention", answer("efficient"))
        with FakeTensorMode():
            query, key = (torch.empty(1, n, 64, width, device="cuda", dtype=torch.bfloat16) for n in (8, heads))
            return attention.fused_kernel(query, key, key, True)

    assert kernel(2, 64, "flash", "efficient") == "flash"
    assert asked == [("flash", 2, True, True)]
    assert kernel(2, 64, "efficient") == "efficient"
    assert asked == [("flash", 2, True, True), ("efficient", 8, True, False)]
    assert kernel(8, 12, "flash", "efficient") == "efficient"  # F.scaled_dot_product_attention would pad the heads
    assert kernel(8, 64) is None
    assert attention.fused_kernel(*(torch.empty(1, 8, 64, n) for n in (64, 64, 32)), True) is None


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


@KERNELS
@pytest.mark.usefixtures("with_kernel")
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


DOCUMENTS = ((2, 20, 1, 1), (5, 6, 3, 3, 1, 1, 1, 1, 1, 1, 1))
"""Lengths in two rows: one that is in all chunks, some that end within a chunk, neighbours alike, and padding."""


@KERNELS
@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize(("heads", "keys", "scale"), [(4, 4, None), (4, 2, 0.2)])
@pytest.mark.parametrize("copies", [2, 3, 4])
def test_copies_that_divide_documents_add_up_to_each_alone(copies, heads, keys, scale) -> None:
    """Results and gradients are those with the mask of a packed row; the second call takes what is known of it."""
    *inputs, gradient = tensors(heads, keys)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    positions[0, :2] += 7  # a document begins where a position does not follow the one before
    number = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    mask = (number[:, None, :, None] == number[:, None, None]).tril()
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*whole, mask, scale=scale, enable_gqa=heads != keys)
    expected.backward(gradient)

    def work(rank: int, _: Copy) -> list[torch.Tensor]:
        own_positions = held(positions[:, None], rank, copies)[:, 0]
        for _again in range(2):
            own = [held(x, rank, copies).requires_grad_() for x in inputs]
            made = causal_attention(*own, scale, heads != keys, positions=own_positions)
            made.backward(held(gradient, rank, copies))
        return [made.detach(), *(x.grad for x in own if x.grad is not None)]

    for rank, found in enumerate(run_members(copies, Copy, "context", work)):
        for mine, theirs in zip(found, [expected.detach(), *(x.grad for x in whole)], strict=True):
            assert torch.allclose(mine, held(theirs, rank, copies), rtol=0, atol=1e-13)
