"""Each deferred operation, its closure run, has PyTorch's gradients; and nothing reaches the weights before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from raypipe.runtime.backward.deferred import (
    WeightQueue,
    deferred_embedding,
    deferred_linear,
    deferred_operation,
)
from raypipe.runtime.backward.split_backward import defer_weight_gradients

Call = Callable[..., Tensor]
CONV = {"stride": [2], "padding": [1], "dilation": [1], "groups": 2}


def convolution(dims: int, x: Tensor, w: Tensor, b: Tensor | None, queue: WeightQueue) -> Tensor:
    """A deferred convolution, as a captured graph calls it."""
    function = (torch.ops.aten.conv1d, torch.ops.aten.conv2d, torch.ops.aten.conv3d)[dims - 1].default
    given = [[value] * dims for value in (2, 1, 1)]
    parameters = [p for p in (w, b) if p is not None]
    return deferred_operation(queue, function, range(1, 1 + len(parameters)), parameters, (x, w, b, *given, 2), {})


CASES: dict[str, tuple[Call, Call, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = {
    # plain, deferred, shape of input, weight, bias
    "linear": (F.linear, deferred_linear, (3, 4, 6), (5, 6), (5,)),
    "linear without bias": (F.linear, deferred_linear, (4, 6), (5, 6), None),
    "product": (lambda x, w, b: torch.addmm(b, x, w), partial(deferred_linear, flipped=True), (4, 6), (6, 5), (5,)),
    "convolution 1d": (lambda x, w, b: F.conv1d(x, w, b, **CONV), lambda x, w, b, q: convolution(1, x, w, b, q),
                       (2, 4, 9), (6, 2, 3), (6,)),
    "convolution 2d": (lambda x, w, b: F.conv2d(x, w, b, **CONV), lambda x, w, b, q: convolution(2, x, w, b, q),
                       (2, 4, 9, 7), (6, 2, 3, 3), (6,)),
    "convolution 3d without bias": (lambda x, w, b: F.conv3d(x, w, b, **CONV),
                                    lambda x, w, b, q: convolution(3, x, w, b, q),
                                    (2, 4, 5, 4, 3), (6, 2, 3, 3, 3), None),
}  # fmt: skip


def made(shape: tuple[int, ...] | None, seed: int) -> Tensor | None:
    if shape is None:
        return None
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "input"])
def test_gradients_are_pytorchs(case: str, frozen: str) -> None:
    plain, deferred, *shapes = CASES[case]
    ours, theirs = ([made(shape, i) for i, shape in enumerate(shapes)] for _ in range(2))
    for leaves in (ours, theirs):
        for leaf, name in zip(leaves, ("input", "weight", "bias"), strict=True):
            if leaf is not None and name == frozen:
                leaf.requires_grad_(False)
    queue = WeightQueue()
    for _ in range(2):  # gradients add up over micro-batches
        y, expected = deferred(*ours, queue), plain(*theirs)
        assert torch.equal(y, expected)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
        expected.backward(grad)
        waiting = []
        with queue.collect(waiting):
            y.backward(grad)
        seen = None if ours[1].grad is None else ours[1].grad.clone()
        assert (seen is None) == (ours[1].grad is None)
        with torch.no_grad():
            for closure in waiting:
                closure.compute()
        if seen is not None:
            assert not torch.equal(seen, ours[1].grad)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embeddings_padding_has_no_gradient(padding: int | None) -> None:
    ids = torch.tensor([[2, 0, 2], [1, 1, 3]])
    ours, theirs = (made((5, 4), 0) for _ in range(2))
    queue, waiting = WeightQueue(), []
    y, expected = deferred_embedding(ids, ours, padding, queue), F.embedding(ids, theirs, padding)
    grad = torch.randn(2, 3, 4, dtype=torch.float64)
    expected.backward(grad)
    with queue.collect(waiting):
        y.backward(grad)
    assert ours.grad is None
    with torch.no_grad():
        waiting[0].compute()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


class Operations(nn.Module):
    """One of each operation, on parameters and not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 6))
        self.image = nn.Parameter(torch.randn(4, 1, 3))
        self.matrix, self.vector = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.square, self.twice = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, ids: Tensor) -> Tensor:
        aten = torch.ops.aten
        x = aten.embedding.default(self.table, ids, 3)
        x = aten.conv1d.default(x.unsqueeze(1), self.image, None, [1], [1]).mean(1)
        x = aten.addmm.default(self.vector, x, self.matrix)
        x = aten.addmm.default(x, x, self.square)  # its addend is no parameter
        x = aten.linear.default(x, self.twice)
        return x * self.twice.mean()  # and not only by what can wait


@pytest.mark.parametrize("autocast", [False, True], ids=["float64", "bfloat16 autocast"])
def test_operations_of_a_graph_wait_where_they_can(autocast: bool) -> None:
    torch.manual_seed(0)
    plain = Operations().to(torch.float32 if autocast else torch.float64)
    split = fx.symbolic_trace(plain)
    split = fx.GraphModule(Operations().to(plain.table.dtype), split.graph)
    split.load_state_dict(plain.state_dict())
    queue, waiting = WeightQueue(), []
    assert set(defer_weight_gradients(split, queue)) == {"twice"}
    ids = torch.tensor([0, 3, 6, 1, 1])
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        expected, y = plain(ids), split(ids)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    expected.backward(grad)
    with queue.collect(waiting):
        y.backward(grad)
    early = {name for name, p in split.named_parameters() if p.grad is not None}
    assert early == {"twice"}
    with torch.no_grad():
        for closure in waiting:
            closure.compute()
    for name, a in plain.named_parameters():
        b = split.get_parameter(name)
        # Under autocast both take the same products of bfloat16 numbers; autograd rounds each gradient once more.
        close = {"rtol": 2**-7, "atol": 2**-7 * float(a.grad.abs().max())} if autocast else {"rtol": 0, "atol": 1e-11}
        torch.testing.assert_close(b.grad, a.grad, msg=lambda m, n=name: f"{n}: {m}", **close)
