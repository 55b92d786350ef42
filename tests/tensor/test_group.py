"""The loss of divided logits is torch's of the whole ones, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raypipe.tensor import Shard
from raypipe.tensor.operators import divided_cross_entropy
from tests.tensor.threads import run_tensor_ranks


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("size", "vocabulary"), [(1, 7), (2, 8), (2, 7), (4, 5)])
def test_divided_cross_entropy(size: int, vocabulary: int, smoothing: float) -> None:
    """Also where the last members' rows lie beyond the vocabulary, and with logits that overflow unless shifted."""
    torch.manual_seed(0)
    whole = (1000 * torch.randn(6, vocabulary, dtype=torch.float64)).requires_grad_()
    whole.data[3] = torch.randn(vocabulary)
    targets = torch.tensor([0, vocabulary - 1, -100, 2, 1, -100])
    expected = F.cross_entropy(whole, targets, reduction="sum", label_smoothing=smoothing)
    (3 * expected).backward()
    shard = Shard(1, (vocabulary,), size, padded=True)

    def work(rank: int, tensor_rank: object) -> tuple[float, torch.Tensor]:
        own = shard.cut(whole.detach(), rank).requires_grad_()
        loss = divided_cross_entropy(own, targets, vocabulary, -100, smoothing)
        (3 * loss).backward()
        return loss.item(), own.grad

    result = run_tensor_ranks(size, work)
    assert [loss for loss, _ in result] == pytest.approx([expected.item()] * size, abs=1e-9)
    torch.testing.assert_close(shard.join([g for _, g in result]), whole.grad, rtol=0, atol=1e-12)
    for rank, (_, gradient) in enumerate(result):  # nothing for what lies beyond
        assert not gradient[:, max(0, vocabulary - rank * gradient.shape[1]) :].any()
