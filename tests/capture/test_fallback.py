"""What export gives up on: the module runs as it is, inside a graph that is cut like any other; or a clear error."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raypipe.capture.capture import capture, told_if_slow
from raypipe.capture.captured import captured_once
from raypipe.capture.meta import build_without_memory
from raypipe.capture.opaque import TARGET
from raypipe.capture.stage_module import build_subgraph
from raypipe.errors import CaptureError
from raypipe.graph.subgraphs import shard
from tests.capture.chain import build_chain, parameters, run_chain


class Branch(nn.Module):
    """Chooses by value, takes a flag and a second tensor, and returns two."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor, other: Tensor, *, twice: bool) -> tuple[Tensor, Tensor]:
        chosen = self.high if x.mean() > 0 else self.low
        return chosen(x) * (2 if twice else 1) + other * self.scale, x.sum(-1)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor, *, twice: bool) -> tuple[Tensor, Tensor]:
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            x = self.step(x)
        return x + other, x.sum(-1)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor, *, twice: bool) -> tuple[Tensor, Tensor]:
        return self.step(x) * float(np.tanh(x.detach().numpy().mean())) + other, x.sum(-1)


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.odd, self.after = nn.Linear(8, 8), kind(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.odd(self.before(x).relu(), x, twice=True)
        return x + self.after(y) * total.unsqueeze(-1).tanh()


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.start = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.end = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Branch, Loop, Foreign])
def test_a_module_that_cannot_be_read_runs_as_it_is(kind, tmp_path):
    def build() -> nn.Module:
        return Net(kind).double()

    said: list[str] = []
    data = {"x": torch.randn(4, 4, dtype=torch.float64)}
    module = build_without_memory(build)
    one = captured_once("key", lambda: capture(module, data, notify=said.append), tmp_path)
    one = captured_once("key", lambda: pytest.fail("captured twice"), tmp_path)
    (notice,) = said
    assert notice.startswith("each of blocks.0.odd .. blocks.2.odd runs as it is")
    assert "test_fallback.py:" in notice
    cut = shard(one.graph)
    assert cut.count == 5
    assert {len(crossing) for crossing in cut.cuts} == {1}
    torch.manual_seed(0)
    whole = build()
    chain = build_chain(one, [cut.operations(range(i, i + 1)) for i in range(5)], dict(whole.named_parameters()), build)
    for batch in (2, 7):
        x = torch.randn(batch, 4, dtype=torch.float64)
        wanted, got = whole(x), run_chain(one, chain, {"x": x})["output"]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        whole.zero_grad()
        for p in parameters(chain).values():
            p.grad = None
        wanted.square().sum().backward()
        got.square().sum().backward()
        mine = parameters(chain)
        assert mine.keys() == dict(whole.named_parameters()).keys()
        for name, p in whole.named_parameters():
            zero = torch.zeros_like(p)
            torch.testing.assert_close(
                zero if mine[name].grad is None else mine[name].grad, zero if p.grad is None else p.grad,
                rtol=0, atol=1e-12,
            )  # fmt: skip
    with pytest.raises(CaptureError, match="there is no way to construct it"):
        build_subgraph(one, range(len(one.graph.operations)), (), ())


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = -y
        return y


class Stray(nn.Module):
    """Its odd module returns a size that none of its inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = Chosen()

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x).sum()


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.repeat(3, 1) if y.sum().item() == 0.5 else y.repeat(2, 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Root()
        self.layer = nn.Linear(4, 4)
        self.layer.weight = self.first.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Root, "depends on the values of a tensor: if y.sum() > 0:"),
        (Stray, "module odd: cannot be captured, and its result's size 6 equals no size of its inputs"),
        (Tied, "it shares first.layer.weight with layer.weight"),
    ],
)
def test_a_model_that_cannot_be_captured_runs_as_it_is(kind, why):
    """One notice says what it costs; parameters keep their names, and results are the model's own."""
    said: list[str] = []
    module = kind()
    one = capture(module, {"x": torch.randn(3, 4)}, notify=said.append)
    assert len([words for words in said if "as one stage" in words and why in words]) == 1
    part = build_subgraph(one, range(len(one.graph.operations)), (), (), "cpu", kind)
    names = dict(module.named_parameters())
    assert dict(part.module.named_parameters()).keys() == names.keys() == one.graph.parameters.keys()
    for name, value in module.named_parameters(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        part.module.get_submodule(parent)._parameters[leaf] = value
    x = torch.randn(5, 4)
    (result,) = part.module(x)
    assert torch.equal(result, module(x))


@pytest.mark.parametrize(
    ("kind", "where", "why", "fix"),
    [
        (Chosen, "test_fallback.py", "result's size 6 equals no size of its inputs", "torch.where"),
    ],
)
def test_what_cannot_be_captured_at_all_says_so(kind, where, why, fix):
    with pytest.raises(CaptureError) as caught:
        capture(kind(), {"x": torch.randn(3, 4)}, notify=lambda _: None)
    assert where in caught.value.where
    assert why in caught.value.why
    assert fix in caught.value.fix
    assert caught.value.exit_status == 2


def test_modules_that_are_asked_to_run_as_they_are() -> None:
    result = capture(Holder(), {"x": torch.randn(3, 4)}, as_it_is=["inner"], notify=lambda _: None)
    assert [o.module for o in result.graph.operations if o.target == TARGET] == ["inner"]
    with pytest.raises(CaptureError, match=r"cannot run as it is: it shares .*layer\.weight with"):
        capture(Tied(), {"x": torch.randn(3, 4)}, as_it_is=["first"], notify=lambda _: None)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_an_output_that_is_not_there():
    with pytest.raises(CaptureError, match='did you mean "output"'):
        capture(nn.Linear(4, 4), {"input": torch.randn(3, 4)}, outputs=["outputs"])


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.3)
        return x * 2


def test_a_long_capture_says_which_module_it_is_in() -> None:
    said: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), Slow())
    with told_if_slow(model, said.append, first_s=0.1):
        model(torch.randn(3, 4))
    assert "is in module 1 now: model.as_it_is runs it as it is" in said[0]
    count = len(said)
    with told_if_slow(model, said.append):
        model(torch.randn(3, 4))
    assert len(said) == count
