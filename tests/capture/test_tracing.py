"""What models do with sizes, lists of samples and casts is captured for micro-batches of any size, or runs as it is."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.modules.module import _global_forward_pre_hooks

from raypipe.capture.capture import capture
from raypipe.capture.opaque import as_plain, like
from raypipe.capture.stage_module import build_subgraph
from raypipe.capture.tracing import traced


class Joined(nn.Module):
    """Puts its samples together again: one behind the other, side by side, and in a new dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.layer(x))
        joined = torch.cat(y, dim=0).sum() + torch.cat([*y], -1).square().mean() + torch.stack(y, 1).mean()
        return self.layer(x) * joined


class Length(Joined):
    """Asks how many samples there are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(len(x), -1).unflatten(1, (3, 4)) / len(x)


class Loop(Joined):
    """Does something with each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) * row.sum() for row in x])


class Counted(Joined):
    """Uses the length of the list, which nobody can trace."""

    def forward(self, x: Tensor) -> Tensor:
        rows = list(self.layer(x))
        return torch.cat(rows).unflatten(0, (-1, 3)) * rows.__len__()


class Cast(Joined):
    """Computes one layer in another precision, and looks at values behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.to(torch.float32)(x.to(torch.float32)).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "as_it_is"), [(Joined, False), (Length, False), (Loop, True), (Counted, True), (Cast, False)]
)
def test_any_number_of_samples_gives_what_the_model_gives(kind: type[nn.Module], as_it_is: bool) -> None:
    said: list[str] = []
    module = kind().double()
    one = capture(module, {"x": torch.randn(2, 3, 4, dtype=torch.float64)}, notify=said.append)
    assert any("as one stage" in words for words in said) == as_it_is
    part = build_subgraph(one, range(len(one.graph.operations)), (), (), "cpu", lambda: kind().double())
    for name, value in module.named_parameters():
        assert value.dtype == torch.float64
        parent, _, leaf = name.rpartition(".")
        part.module.get_submodule(parent)._parameters[leaf] = value
    for samples in (1, 2, 5):
        x = torch.randn(samples, 3, 4, dtype=torch.float64)
        (result,) = part.module(x)
        result.square().sum().backward()
        mine = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.zero_grad()
        torch.testing.assert_close(result, kind.forward(module, x) if kind is not Cast else in_float32(module, x))
        wanted = kind.forward(module, x) if kind is not Cast else in_float32(module, x)
        wanted.square().sum().backward()
        for name, p in module.named_parameters():
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-12, atol=1e-12)
        module.zero_grad()


def in_float32(module: Any, x: Tensor) -> Tensor:
    weight, bias = (p.to(torch.float32) for p in (module.layer.weight, module.layer.bias))
    return nn.functional.linear(x.to(torch.float32), weight, bias).to(x.dtype)


def test_patches_are_gone_after_a_capture() -> None:
    before = len, torch.autograd.Function.apply, nn.Module.to, _global_forward_pre_hooks.copy()
    module = Cast().double()
    capture(module, {"x": torch.randn(2, 3, 4, dtype=torch.float64)}, notify=lambda _: None)
    assert before == (len, torch.autograd.Function.apply, nn.Module.to, _global_forward_pre_hooks)
    assert "forward" not in vars(module.layer)


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(x)


class Estimated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rounded, self.last = nn.Linear(4, 4), Rounded(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rounded(self.first(x)))


def test_a_backward_of_its_own_is_kept() -> None:
    said: list[str] = []
    torch.manual_seed(0)  # some values round to zero all alike, which has no gradients
    module = Estimated().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    one = capture(module, {"x": x}, notify=said.append)
    (notice,) = said
    assert "module rounded runs as it is" in notice
    assert "Straight has a backward of its own" in notice
    part = build_subgraph(one, range(len(one.graph.operations)), (), (), "cpu", lambda: Estimated().double())
    for name, value in module.named_parameters():
        parent, _, leaf = name.rpartition(".")
        part.module.get_submodule(parent)._parameters[leaf] = value
    part.module(x)[0].square().sum().backward()
    mine = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    module(x).square().sum().backward()
    for name, p in module.named_parameters():
        assert p.grad.any()
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-12, atol=1e-12)


class Halves(nn.Module):
    """Divides sizes as Longformer does."""

    def forward(self, x: Tensor) -> Tensor:
        half = torch.div(x.shape[1], 2, rounding_mode="trunc")
        return x[:, :half] * torch.div(-7, 2, rounding_mode="trunc") + torch.div(-7, 2, rounding_mode="floor")


def test_division_of_sizes_stays_symbolic() -> None:
    module, x = Halves(), torch.randn(3, 6)
    with traced():
        program = torch.export.export(module, (x,), dynamic_shapes={"x": {1: Dim.DYNAMIC}}, strict=False)
    for columns in (4, 6, 9):
        x = torch.randn(3, columns)
        assert torch.equal(program.module()(x), module(x))


@dataclass
class Pair:
    first: Tensor
    second: Any = None


class Named(NamedTuple):
    first: Tensor
    rest: Any


class Table(OrderedDict[str, Any]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Pair(torch.ones(2), [Pair(torch.zeros(1)), None]),
        Named(torch.ones(2), {"inner": Pair(torch.ones(3))}),
        Table(a=torch.ones(1), b=(Table(c=torch.ones(2)), 3)),
    ],
    ids=["dataclass", "named tuple", "mapping"],
)
def test_structures_are_taken_apart_and_put_together(value: Any) -> None:
    plain = as_plain(value)
    assert not any(name in repr(plain) for name in ("Pair", "Table"))
    assert repr(like(value, plain)) == repr(value)
