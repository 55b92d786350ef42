"""A parameter starts alike whichever stage holds it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_

from raypipe.models.start_values import Constructed, _orthogonal, _sparse


class Truncated(nn.Module):
    """Truncated normals, as vision transformers start with, then an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(200, 50))
        self.second = nn.Linear(50, 10)
        self.third = nn.Parameter(torch.empty(400))
        nn.init.trunc_normal_(self.first, std=2.0)
        nn.init.trunc_normal_(self.third, mean=1.0, std=1.5, a=0.0, b=4.0)
        nn.init.kaiming_uniform_(self.second.weight)


NAMES = ["first", "second.weight", "second.bias", "third"]


@pytest.mark.parametrize("held", [[name] for name in NAMES] + [NAMES[1:], NAMES[:2]], ids=" ".join)
def test_start_values_do_not_depend_on_what_else_is_held(held: list[str]) -> None:
    whole = Constructed(Truncated).read(NAMES, [], seed=3)
    part = Constructed(Truncated).read(held, [], seed=3)
    assert set(part) == set(held)
    for name in held:
        assert torch.equal(part[name], whole[name]), name


class Orthogonal(nn.Module):
    """Matrices of torch's two functions that draw nothing on the meta device, then one of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Parameter(torch.empty(12, 2, 4))
        self.wide = nn.Parameter(torch.empty(5, 9))
        self.sparse = nn.Parameter(torch.empty(10, 6))
        self.last = nn.Linear(6, 3)
        orthogonal_(self.tall, gain=2.0)
        orthogonal_(self.wide)
        nn.init.sparse_(self.sparse, 0.25)
        nn.init.normal_(self.last.weight)


LATE = ["tall", "wide", "sparse", "last.weight"]


@pytest.mark.parametrize("held", [[name] for name in LATE] + [LATE[1:], LATE[2:]], ids=" ".join)
def test_nor_where_torch_draws_nothing_without_memory(held: list[str]) -> None:
    whole = Constructed(Orthogonal).read(LATE, [], seed=3)
    part = Constructed(Orthogonal).read(held, [], seed=3)
    for name in held:
        assert torch.equal(part[name], whole[name]), name


def test_they_are_still_orthogonal_and_sparse_and_torch_is_left_as_it_was() -> None:
    before = orthogonal_.__code__
    values = Constructed(Orthogonal).read(LATE, [], seed=3)
    assert orthogonal_.__code__ is before
    tall = values["tall"].reshape(12, 8)
    assert torch.allclose(tall.T @ tall, 4 * torch.eye(8), atol=1e-5)
    assert torch.allclose(values["wide"] @ values["wide"].T, torch.eye(5), atol=1e-6)
    assert ((values["sparse"] == 0).sum(0) == 3).all()
    torch.manual_seed(0)
    ours = _orthogonal(torch.empty(4, 7), gain=1.5)
    torch.manual_seed(0)
    assert torch.allclose(ours, orthogonal_(torch.empty(4, 7), gain=1.5), atol=1e-6)
    torch.manual_seed(0)
    ours = _sparse(torch.empty(4, 7), 0.3)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.init.sparse_(torch.empty(4, 7), 0.3))


def test_truncated_normals_have_their_moments_and_bounds() -> None:
    values = Constructed(Truncated).read(["first"], [], seed=3)["first"].double()
    assert values.abs().max() <= 2.0
    # Of a normal cut at one standard deviation: variance 1 - 2 phi(1) / (2 Phi(1) - 1), times 2^2.
    phi = math.exp(-0.5) / math.sqrt(2 * math.pi)
    variance = 4 * (1 - 2 * phi / math.erf(1 / math.sqrt(2)))
    assert float(values.mean()) == pytest.approx(0.0, abs=0.04)
    assert float(values.var()) == pytest.approx(variance, rel=0.05)
