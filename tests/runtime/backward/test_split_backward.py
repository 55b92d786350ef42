"""B and W together give what autograd gives, and W's share really waits for W."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.job import GptSpec
from raypipe.models import GptLayers, join_tied, random_keys
from raypipe.runtime.backward.split_backward import Closure, WeightQueue, defer_weight_gradients
from raypipe.runtime.stage.stage import StageModule

MODEL = GptSpec(layers=2, hidden=16, heads=2, sequence=8, vocabulary=32, dropout=0.1, tie_embeddings=True)


def twins(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, nn.Module, WeightQueue, list[str]]:
    """The same module twice, the second one with deferred weight gradients."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    split = make().to(dtype)
    split.load_state_dict(plain.state_dict())
    queue = WeightQueue()
    return plain, split, queue, defer_weight_gradients(split, queue)


def backward(y: Tensor, grad: Tensor, queue: WeightQueue) -> list[Closure]:
    closures: list[Closure] = []
    with queue.collect(closures):
        y.backward(grad)
    return closures


def weight_step(closures: list[Closure]) -> None:
    with torch.no_grad():
        for closure in closures:
            closure.compute()


def assert_same_grads(plain: nn.Module, split: nn.Module, tolerance: float) -> None:
    for (name, a), (_, b) in zip(plain.named_parameters(), split.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert a.grad.dtype == b.grad.dtype, name
            # Only the order of a sum may differ: relative to the largest entry.
            assert (a.grad - b.grad).abs().max() <= tolerance * a.grad.abs().max().clamp(min=1e-3), name


def gpt() -> nn.Sequential:
    plan = GptLayers(MODEL)
    layers = [plan.build(i, seed=1) for i in range(plan.count)]
    join_tied(plan, dict(enumerate(layers)))
    return nn.Sequential(*layers)


CASES = {
    "linear": (lambda: nn.Linear(6, 5), (4, 3, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (4, 6)),
    "linear on one vector": (lambda: nn.Linear(6, 5), (6,)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 3, 6)),
    "layer norm over two dimensions": (lambda: nn.LayerNorm((3, 6)), (4, 3, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "a stack with what cannot wait": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.LayerNorm(6), nn.Conv1d(3, 3, 1), nn.Linear(6, 2)),
        (4, 3, 6),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_autograds_in_float64(case: str) -> None:
    make, shape = CASES[case]
    plain, split, queue, _ = twins(make, torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    y, y2 = plain(x), split(x2)
    assert torch.equal(y, y2)
    grad = torch.randn_like(y)
    y.backward(grad)
    weight_step(backward(y2, grad, queue))
    assert (x.grad - x2.grad).abs().max() <= 1e-12
    assert_same_grads(plain, split, 1e-12)


def test_transposed_inputs_and_gradients() -> None:
    plain, split, queue, _ = twins(lambda: nn.Linear(6, 5), torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    grad = torch.randn(5, 4, dtype=torch.float64).t()
    plain(x.t()).backward(grad)
    weight_step(backward(split(x2.t()), grad, queue))
    assert (x.grad - x2.grad).abs().max() <= 1e-12
    assert_same_grads(plain, split, 1e-12)


def run_gpt(model: nn.Module, tokens: Tensor, targets: Tensor, autocast: bool) -> Tensor:
    """Mean loss; dropout follows from keys, so it is the same for both twins."""
    with random_keys(5, 0, range(len(tokens)), True), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float() if autocast else logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-12),
        # Same products of the same bfloat16 numbers; only sums over tokens are taken in another order.
        (torch.float32, True, 1e-5),
    ],
    ids=["float64", "bfloat16 autocast"],
)
def test_gpt_with_tied_embeddings_over_two_microbatches(dtype, autocast, tolerance) -> None:
    """Embedding, attention, dropout, GELU, and one matrix used by the first and the last layer."""
    plain, split, queue, _ = twins(gpt, dtype)
    assert split[0].token.weight is split[-1].project.weight
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 32, (2, 3, 8), generator=generator).unbind() for _ in range(2)]
    waiting = []
    for tokens, targets in batches:
        run_gpt(plain, tokens, targets, autocast).backward()
        loss = run_gpt(split, tokens, targets, autocast)
        waiting.append(backward(loss, torch.ones_like(loss), queue))
    for closures in reversed(waiting):  # W of the micro-batches in another order than B
        weight_step(closures)
    assert_same_grads(plain, split, tolerance)


def test_weight_gradients_run_in_any_order() -> None:
    plain, split, queue, _ = twins(gpt, torch.float64)
    tokens, targets = torch.randint(0, 32, (2, 3, 8), generator=torch.Generator().manual_seed(0)).unbind()
    run_gpt(plain, tokens, targets, False).backward()
    loss = run_gpt(split, tokens, targets, False)
    closures = backward(loss, torch.ones_like(loss), queue)
    random.Random(0).shuffle(closures)
    weight_step(closures)
    assert_same_grads(plain, split, 1e-12)


def test_nothing_accumulates_before_w() -> None:
    _, split, queue, _ = twins(gpt, torch.float64)
    tokens, targets = torch.randint(0, 32, (2, 3, 8), generator=torch.Generator().manual_seed(0)).unbind()
    loss = run_gpt(split, tokens, targets, False)
    closures = backward(loss, torch.ones_like(loss), queue)
    early = {name for name, p in split.named_parameters() if p.grad is not None}
    assert early == {n for n, _ in split.named_parameters() if "norm" in n}  # both gradients come from one kernel
    weight_step(closures)
    assert all(p.grad is not None for p in split.parameters())


class OwnLinear(nn.Linear):
    """A subclass may compute anything."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.waits = nn.Linear(4, 4)
        self.own = OwnLinear(4, 4)
        self.bare = nn.Parameter(torch.ones(4))
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.frequent = nn.Embedding(3, 4, scale_grad_by_freq=True)
        self.padded_waits = nn.Embedding(3, 4, padding_idx=0)
        self.also_waits = nn.Embedding(3, 4)
        self.norm = nn.LayerNorm(4)


def test_parameters_that_cannot_wait_are_named() -> None:
    names = defer_weight_gradients(Model(), WeightQueue())
    assert {name.split(".")[0] for name in names} == {"own", "bare", "recurrent", "frequent", "norm"}
    assert "recurrent.weight_ih_l0" in names


def test_the_first_layer_needs_no_input_gradient_and_frozen_parameters_get_none() -> None:
    plain, split, queue, _ = twins(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.double
    )
    for model in (plain, split):
        model[0].bias.requires_grad_(False)
        model[1].weight.requires_grad_(False)
        model[2].weight.requires_grad_(False)
    x = torch.randn(3, 4, dtype=torch.double)
    plain(x).sum().backward()
    y = split(x)
    weight_step(backward(y, torch.ones_like(y), queue))
    assert [n for n, p in split.named_parameters() if p.grad is None] == ["0.bias", "1.weight", "2.weight"]
    assert_same_grads(plain, split, 1e-12)


def test_a_layer_used_twice() -> None:
    plain, split, queue, _ = twins(lambda: nn.Linear(4, 4), torch.double)
    x = torch.randn(3, 4, dtype=torch.double)
    plain(plain(x).tanh()).sum().backward()
    y = split(split(x).tanh())
    weight_step(backward(y, torch.ones_like(y), queue))
    assert_same_grads(plain, split, 1e-12)


def test_evaluation_leaves_nothing_waiting() -> None:
    _, split, queue, _ = twins(lambda: nn.Linear(4, 4), torch.float32)
    with torch.no_grad():
        y = split(torch.randn(3, 4))
    assert not y.requires_grad
    assert queue.current == []


OVERWRITES = {
    "input of a linear layer": (lambda: nn.Linear(4, 4), lambda x, m: x.mul_(2)),
    "weight of a linear layer": (lambda: nn.Linear(4, 4), lambda x, m: m.weight.mul_(2)),
    "input of a layer norm": (lambda: nn.LayerNorm(4), lambda x, m: x.mul_(2)),
    "weight of a layer norm": (lambda: nn.LayerNorm(4), lambda x, m: m.weight.mul_(2)),
    "ids of an embedding": (lambda: nn.Embedding(4, 4), lambda x, m: x.add_(1)),
}


@pytest.mark.parametrize("case", OVERWRITES)
def test_overwriting_what_the_backward_needs_is_an_error(case: str) -> None:
    """As in autograd: wrong gradients must not pass in silence."""
    make, overwrite = OVERWRITES[case]
    plain, split, queue, _ = twins(make, torch.float32)
    for model in (plain, split):
        x = (
            torch.zeros(3, dtype=torch.long)
            if isinstance(model, nn.Embedding)
            else torch.randn(3, 4).requires_grad_() * 1
        )
        y = model(x)
        with torch.no_grad():
            overwrite(x, model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weight_step(backward(y, torch.ones_like(y), queue))


def test_a_stage_that_is_given_up_keeps_neither_parameters_nor_gradients() -> None:
    """Though its deferred layers refer to themselves and nobody collects garbage."""
    stage = StageModule(GptLayers(MODEL, torch.float32), [1, 2], 0, torch.device("cpu"), split=True)
    parameters = list(stage.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    gradients = [weakref.ref(parameter.grad) for parameter in parameters]
    stage.release()
    del stage
    assert [parameter.numel() for parameter in parameters] == [0] * len(parameters)
    assert [gradient() for gradient in gradients] == [None] * len(gradients)


class Products(nn.Module):
    """Products that no layer of torch's makes, and weights that are made of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(2, 5, 4))
        self.scale, self.bias = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4))
        self.tied = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.a * self.scale)  # an expression of two parameters
        y = torch.bmm(y, self.b) + torch.einsum("bsd,bdf->bsf", y, self.b[[1, 0]])
        y = F.linear(y, self.tied.t(), self.bias) + y @ self.tied.t()  # one expression, two products
        return y.tanh()


def test_any_product_waits_and_so_does_what_weights_are_made_of() -> None:
    """Nothing is in a gradient before W, and all is after it; a second micro-batch adds to it."""
    torch.manual_seed(0)
    plain, split, queue = Products().double(), Products().double(), WeightQueue()
    split.load_state_dict(plain.state_dict())
    module = torch.export.export(split, (torch.randn(2, 3, 6, dtype=torch.float64),)).module(check_guards=False)
    assert defer_weight_gradients(module, queue) == []
    result = dict(module.named_parameters())
    for _ in range(2):
        x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
        x2 = x.detach().clone().requires_grad_()
        grad = torch.randn(2, 3, 4, dtype=torch.float64)
        plain(x).backward(grad)
        before = {n: None if p.grad is None else p.grad.clone() for n, p in result.items()}
        closures = backward(module(x2), grad, queue)
        for name, p in result.items():
            assert (p.grad is None) if before[name] is None else torch.equal(p.grad, before[name]), name
        weight_step(closures)
        torch.testing.assert_close(x2.grad, x.grad, rtol=0, atol=1e-12)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(result[name].grad, p.grad, rtol=0, atol=1e-12, msg=name)
