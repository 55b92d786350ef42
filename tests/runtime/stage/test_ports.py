"""Gradients of a stage's outputs, put together from the messages of the stages that read them."""

from __future__ import annotations

import pytest
import torch

from raypipe.runtime.stage.shapes import Ports

A, B, C = (torch.tensor([x]) for x in (1.0, 10.0, 100.0))


@pytest.mark.parametrize(
    ("returned", "arrived", "total"),
    [
        ({1: (0, 1)}, [(1, (A, B))], [1.0, 10.0]),
        ({1: (1, 0)}, [(1, (A, B))], [10.0, 1.0]),  # the stage names its arrivals in another order
        ({1: (0, 1), 3: (1,)}, [(1, (A, B)), (3, (C,))], [1.0, 110.0]),
        ({1: (1,), 2: (0,)}, [(1, (A,)), (2, (B,))], [10.0, 1.0]),
        ({2: ()}, [(2, ())], []),
    ],
)
def test_gradients_of_outputs(
    returned: dict[int, tuple[int, ...]], arrived: list[tuple[int, tuple[torch.Tensor, ...]]], total: list[float]
) -> None:
    ports = Ports({}, returned, {})
    assert [float(x) for x in ports.summed(arrived)] == total
