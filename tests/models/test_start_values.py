"""A parameter starts alike whichever stage holds it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raypipe.models.start_values import Constructed


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


def test_truncated_normals_have_their_moments_and_bounds() -> None:
    values = Constructed(Truncated).read(["first"], [], seed=3)["first"].double()
    assert values.abs().max() <= 2.0
    # Of a normal cut at one standard deviation: variance 1 - 2 phi(1) / (2 Phi(1) - 1), times 2^2.
    phi = math.exp(-0.5) / math.sqrt(2 * math.pi)
    variance = 4 * (1 - 2 * phi / math.erf(1 / math.sqrt(2)))
    assert float(values.mean()) == pytest.approx(0.0, abs=0.04)
    assert float(values.var()) == pytest.approx(variance, rel=0.05)
