"""Which operations compute each position by itself: small models, each with one that does or does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import CaptureError
from raypipe.graph.positions import sequence_flow
from raypipe.job.spec import job_from
from raypipe.models import build_model

WIDTH = 8


def attention(x: Tensor, causal: bool) -> Tensor:
    heads = x.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=causal).transpose(1, 2).flatten(2)


def folded(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(-1, WIDTH).view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)


def routed(x: Tensor, dim: int) -> Tensor:
    """What routers to experts do: the largest of values, their places, and zero elsewhere."""
    values, places = x.topk(2, dim)
    return torch.zeros_like(x).scatter(dim, places, values) + x.gather(dim, places).sum(dim, keepdim=True)


FINE = {
    "rows": lambda x: (x * 2).softmax(-1) + x.mean(-1, keepdim=True),
    "causal": lambda x: attention(x, True),
    "merged": lambda x: x.reshape(-1, WIDTH).relu().view(x.shape),
    "positions": lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1) / 7.0,
    "angles": lambda x: (
        x + (torch.ones(1, WIDTH, 1) @ torch.arange(x.shape[1])[None, None].float()).transpose(1, 2).cos()
    ),
    "halves": lambda x: torch.cat([x[..., 4:], -x[..., :4]], -1),
    "routed": lambda x: routed(x.reshape(-1, WIDTH), -1).view(x.shape),
    "repeated": lambda x: x.repeat_interleave(2, -1)[..., :WIDTH],
    "parts": lambda x: torch.slice_scatter(
        torch.slice_scatter(x.new_empty(x.shape), x[..., :4], 2, 0, 4), x[..., 4:], 2, 4
    ),
}
WRONG = {
    "bidirectional": lambda x: attention(x, False),
    "sum so far": lambda x: x.cumsum(1),
    "reversed": lambda x: x.flip(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax over positions": lambda x: x.softmax(1),
    "shifted": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "rolled": lambda x: x.roll(1, 1),
    "length as a value": lambda x: x * x.shape[1],
    "positions from the end": lambda x: x + (x.shape[1] - torch.arange(x.shape[1])).unsqueeze(-1),
    "products of positions": lambda x: x @ (x.transpose(1, 2) @ x),
    "all positions": lambda x: x + (x[:1, 0, :1] * 0 + torch.ones(1, x.shape[1])) @ torch.arange(x.shape[1]).float(),
    "samples and positions exchanged": folded,
    "first position": lambda x: x + x[:, :1],
    "routed among positions": lambda x: routed(x, 1),
    "rows routed among positions": lambda x: routed(x.reshape(-1, WIDTH), 0).view(x.shape),
    "repeated positions": lambda x: x.repeat_interleave(2, 1)[:, : x.shape[1]],
    "sorted": lambda x: x.sort(1).values,
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH).mT,
    "own attention": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "noise": lambda x: x + torch.rand(x.shape[1], 1),
}


class Small(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.embedding, self.head = nn.Embedding(300, WIDTH), nn.Linear(WIDTH, 300)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head({**FINE, **WRONG}[self.name](self.embedding(input_ids)))


def flow(name: str, folder):
    job = job_from(
        {
            "name": "small", "model": {
                "import": "tests.graph.test_positions:Small", "args": {"name": name}, "task": "causal-lm",
                "sequence": 12,
            },
            "data": {"type": "bytes", "path": str(folder)}, "train": {"steps": 1, "batch": 4},
            "parallel": {"schedule": "1f1b", "stages": 1, "microbatch": 2},
        }
    )  # fmt: skip
    model = build_model(job, None)
    return sequence_flow(model.graph)


@pytest.mark.parametrize("name", FINE)
def test_positions_by_themselves(name, text_folder) -> None:
    assert 1 in flow(name, text_folder).values()


@pytest.mark.parametrize("name", WRONG)
def test_positions_that_meet_are_refused(name, text_folder) -> None:
    with pytest.raises(CaptureError, match="cannot run in slices"):
        flow(name, text_folder)
