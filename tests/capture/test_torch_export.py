"""What a model writes in place comes out as the model itself computes it, without another trace where that is safe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from raypipe.capture.capture import capture
from raypipe.capture.stage_module import build_subgraph


def placed(y: Tensor) -> Tensor:
    """Positions written by index, as the order of experts is turned round (Qwen3-MoE)."""
    order = torch.argsort(y.sum(1), dim=-1)
    back = torch.empty_like(order)
    back[torch.arange(order.shape[0])] = order
    return y + back.to(y.dtype)[:, None, None]


def in_halves(y: Tensor) -> Tensor:
    """A result filled part by part (DeepSeek-V3)."""
    result = y.new_empty(*y.shape[:-1], 8)
    result[..., :4] = y * 2
    result[..., 4:] = y.exp()
    return result.square()


def scaled(y: Tensor) -> Tensor:
    z = y * 3
    z /= z.sum(-1, keepdim=True) + 7
    return z


def cast(y: Tensor) -> Tensor:
    """The result keeps the precision of what is written."""
    z = y.detach() * 2
    z.lt_(0.5)
    return y * z


def under_a_view(y: Tensor) -> Tensor:
    """What is written is read through another tensor later."""
    z = y * 2
    view = z[:, 1:]
    z.mul_(3)
    return view + z[:, :-1]


def to_a_view(y: Tensor) -> Tensor:
    """What is written through a view is read from the tensor."""
    z = y * 2
    z.transpose(1, 2).mul_(3)
    return z


def returned(y: Tensor) -> Tensor:
    z = y * 2
    z.add_(1)
    return z


def both(y: Tensor) -> Tensor:
    """One that is rewritten and one that is not."""
    return in_halves(y)[..., :4] + to_a_view(y)


def repeated(y: Tensor) -> Tensor:
    """A slice that is used again."""
    z = y * 2
    half = z[..., :2]
    half.copy_(y[..., 2:])
    return z.sum() * half


class Writes(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "again"),
    [
        *((then, False) for then in (placed, in_halves, scaled, returned)),
        *((then, True) for then in (cast, under_a_view, to_a_view, repeated, both)),
    ],
)
def test_what_is_written_in_place_gives_what_the_model_gives(
    then: Callable[[Tensor], Tensor], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decompositions, traced_again = ExportedProgram.run_decompositions, []

    def counted(program: ExportedProgram, *args: object) -> ExportedProgram:
        traced_again.append(program)
        return decompositions(program, *args)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    module = Writes(then).double()
    one = capture(module, {"x": torch.randn(2, 3, 4, dtype=torch.float64)}, whole=True)
    assert bool(traced_again) == again
    part = build_subgraph(one, range(len(one.graph.operations)), (), (), "cpu")
    for name, value in module.named_parameters():
        parent, _, leaf = name.rpartition(".")
        part.module.get_submodule(parent)._parameters[leaf] = value
    for samples in (1, 2, 5):
        x = torch.randn(samples, 3, 4, dtype=torch.float64)
        wanted, (result,) = module(x), part.module(x)
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
        gradients = [torch.autograd.grad(y.sum(), list(module.parameters())) for y in (wanted, result)]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
