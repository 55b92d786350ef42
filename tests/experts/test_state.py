"""State is of the model, not of the copies that divide its experts: to the last bit, whoever wrote and who reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raypipe.checkpoint import Checkpoint, commit, open_checkpoint, write_shard
from raypipe.models import build_model
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.state.state import TensorPiece, joined, read_state, state_pieces
from raypipe.runtime.update.optimizer import make_optimizer
from raypipe.tensor import SoloGroup
from tests.experts.test_job_key import job_of

Copy = tuple[StageModule, torch.optim.Optimizer]


class Gathered(SoloGroup):
    """A member of a group, which is given what all members send in the order of its calls."""

    def __init__(self, rank: int, size: int, shares: Iterator[list[Tensor]]) -> None:
        self.rank, self.size, self._shares = rank, size, shares

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        shares = next(self._shares)
        assert shares[self.rank] is x
        return shares if to == self.rank else None


def copies(experts: int, order: Sequence[int] = ()) -> list[Copy]:
    held = {"expert_order": [order, order[::-1]]} if order else {}
    job = job_of({"replicas": 4, "experts": experts, **held}, {"optimizer": "adamw"})
    result = []
    for rank in range(experts):
        model = build_model(job, None, 0, expert_rank=rank)
        module = StageModule(model, range(model.count), 0, torch.device("cpu"), split=False)
        result.append((module, make_optimizer(job.train, module.named)))
    return result


def saved(those: list[Copy], directory: Path) -> Checkpoint:
    pieces: list[list[TensorPiece]] = [state_pieces(module, optimizer, ()) for module, optimizer in those]
    shards = []
    for rank, own in enumerate(pieces):
        shares = iter([[p.tensor for p in each] for each in zip(*pieces, strict=True) if each[0].shard is not None])
        tensors = joined(own, {"experts": Gathered(rank, len(those), shares)})
        shards.append(write_shard(directory, f"rank-{rank:05}", tensors))
    return open_checkpoint(commit(directory, 1, shards, {}))


@pytest.mark.slow
def test_state_is_the_same_bits_under_any_number_of_copies(tmp_path: Path) -> None:
    """Written by two copies after an update with gradients of their own, read by one, two and four."""
    generator = torch.Generator().manual_seed(1)
    two = copies(2)
    dense: dict[str, Tensor] = {}
    for module, optimizer in two:
        for name, parameter in module.named.items():
            own = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = own if name in module.experts else dense.setdefault(name, own)
        optimizer.step()
    first = saved(two, tmp_path / "first")
    expected = first.read(first.keys)
    assert any("exp_avg_sq" in key and "experts" in key for key in expected)
    for experts, order in ((1, ()), (2, ()), (4, ()), (2, (2, 0, 3, 1))):
        again = copies(experts, order)
        for rank, (module, optimizer) in enumerate(again):
            read_state(first, module, optimizer, (), {"tensor": 0, "experts": rank})
        written = saved(again, tmp_path / f"{experts}{order}")
        assert written.keys == first.keys
        found = written.read(written.keys)
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
