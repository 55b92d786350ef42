"""A piece that computes nothing makes the views that its graph makes, also when it is read from its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from raypipe.runtime.compiled.inductor.compile_graph import views_of

VIEWS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "rows transposed": lambda x, y: [x.view(-1, 6).t(), y, x],
    "heads to rows": lambda x, y: [y.permute(0, 2, 1), x[:, 1:]],
    "a part of a part": lambda x, y: [x[1:, 1:].transpose(0, 2)[2:], y.expand(4, 2, 3, 4)],
}


def traced(function: Callable[[Tensor, Tensor], list[Tensor]]) -> torch.fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(torch.empty(2, 4, 6), torch.empty(2, 3, 4))


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    x = torch.randn(3, 4, 6)[1:]  # it does not begin where its memory does
    y = torch.randn(2, 3, 4)
    views = views_of(traced(VIEWS[name]).graph)
    assert views is not None
    read: dict[str, Any] = {}
    exec(views.source_code, read)
    for run in (views, read["call"]):
        values = [x, y]
        made = run(values)
        assert values == []
        for one, wanted in zip(made, VIEWS[name](x, y), strict=True):
            assert torch.equal(one, wanted)
            assert (one.stride(), one.data_ptr()) == (wanted.stride(), wanted.data_ptr())


def test_what_computes_or_changes_the_dtype_is_no_view() -> None:
    assert views_of(traced(lambda x, y: [x[0].t(), y + 1]).graph) is None
    assert views_of(traced(lambda x, y: [x.view(torch.int32), y]).graph) is None
